//! On what, and beside what, it was measured.

use std::fs;
use std::process::Command;

use serde_json::{Value, json};

/// What the host is and how busy it was.
pub struct Conditions {
    when: String,
    commit: String,
    processor: String,
    cores: usize,
    memory_gib: f64,
    kernel: String,
    qemu: String,
    accelerator: String,
    /// Load over one minute before and after.
    load: (f64, f64),
    /// Share of processor time that others took from this virtual host in between, percent.
    stolen: f64,
    ticks: (u64, u64),
}

impl Conditions {
    /// Looks at the host before anything is measured.
    pub fn begin() -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let after = |text: &str, name: &str| {
            let line = text.lines().find(|l| l.starts_with(name)).and_then(|l| l.split_once(':'));
            line.map(|(_, v)| v.trim().to_owned()).unwrap_or_default()
        };
        let first_line = |program: &str, arguments: &[&str]| {
            let out = Command::new(program).args(arguments).current_dir(env!("CARGO_MANIFEST_DIR")).output();
            out.ok().and_then(|o| Some(String::from_utf8_lossy(&o.stdout).lines().next()?.trim().to_owned()))
        };
        let memory = after(&read("/proc/meminfo"), "MemTotal");
        let trial = mainbrella_tests::base_dir().join("accelerator.json");
        let kvm = fs::read(trial).ok().and_then(|t| serde_json::from_slice::<Value>(&t).ok());
        let works = kvm.is_some_and(|t| t["works"] == true);
        Self {
            when: jiff::Timestamp::now().strftime("%Y-%m-%d %H:%M UTC").to_string(),
            commit: first_line("git", &["rev-parse", "--short", "HEAD"]).unwrap_or_else(|| "unknown".to_owned()),
            processor: after(&read("/proc/cpuinfo"), "model name"),
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            memory_gib: memory.trim_end_matches(" kB").parse::<f64>().unwrap_or(0.0) / f64::from(1 << 20),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            qemu: first_line("/usr/bin/qemu-system-x86_64", &["--version"])
                .and_then(|l| Some(l.strip_prefix("QEMU emulator version ")?.split(' ').next()?.to_owned()))
                .unwrap_or_else(|| "unknown".to_owned()),
            accelerator: if works { "KVM" } else { "software emulation" }.to_owned(),
            load: (load(), 0.0),
            stolen: 0.0,
            ticks: ticks(),
        }
    }

    /// Looks again afterwards.
    pub fn end(&mut self) {
        self.load.1 = load();
        let (all, stolen) = ticks();
        let whole = all.saturating_sub(self.ticks.0).max(1);
        self.stolen = stolen.saturating_sub(self.ticks.1) as f64 * 100.0 / whole as f64;
    }

    /// In words.
    pub fn text(&self, quick: bool) -> String {
        let quick = if quick { " Quick: too few samples to quote." } else { "" };
        format!(
            "{} cores ({}), {:.0} GiB, Linux {}, QEMU {}, {}; commit {}, {}. Load {:.1} before and {:.1} after, {:.0} % of \
             processor time stolen by the host's own host. Machines are `micro`.{quick}\n",
            self.cores,
            self.processor,
            self.memory_gib,
            self.kernel,
            self.qemu,
            self.accelerator,
            self.commit,
            self.when,
            self.load.0,
            self.load.1,
            self.stolen,
        )
    }

    /// For programs.
    pub fn json(&self, quick: bool) -> Value {
        json!({
            "when": self.when,
            "commit": self.commit,
            "processor": self.processor,
            "cores": self.cores,
            "memoryGib": self.memory_gib,
            "kernel": self.kernel,
            "qemu": self.qemu,
            "accelerator": self.accelerator,
            "loadBefore": self.load.0,
            "loadAfter": self.load.1,
            "stolenPercent": self.stolen,
            "quick": quick,
        })
    }
}

fn load() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().and_then(|n| n.parse().ok()).unwrap_or(0.0)
}

/// Processor time since boot: all of it, and what was stolen.
fn ticks() -> (u64, u64) {
    let text = fs::read_to_string("/proc/stat").unwrap_or_default();
    let fields: Vec<u64> =
        text.lines().next().unwrap_or("").split_whitespace().skip(1).take(8).filter_map(|n| n.parse().ok()).collect();
    (fields.iter().sum(), fields.get(7).copied().unwrap_or(0))
}

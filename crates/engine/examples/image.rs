//! Makes guest images by hand: `image DATA kernel | initramfs AGENT | template NAME [force] | list | remove NAME | sweep`.

use std::path::Path;
use std::sync::Mutex;
use std::time::Instant;

use mainbrella_engine::image::{Event, ImageStore, Progress};

struct Print(Mutex<(Instant, String)>);

impl Progress for Print {
    fn event(&self, event: Event<'_>) {
        let Ok(mut state) = self.0.lock() else { return };
        match event {
            Event::Step(name) => {
                println!("   {:>6.1} s  {}", state.0.elapsed().as_secs_f32(), state.1);
                *state = (Instant::now(), name.to_owned());
                println!("== {name}");
            }
            Event::Fraction(f) => println!("   {:.0} %", f * 100.0),
            Event::Line(line) => println!("   | {line}"),
            Event::Finished { cached } => {
                println!("   {:>6.1} s  {}", state.0.elapsed().as_secs_f32(), state.1);
                println!("== finished{}", if cached { " (was there)" } else { "" });
            }
            other => println!("   {other:?}"),
        }
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let progress = Print(Mutex::new((Instant::now(), "start".to_owned())));
    match args[..] {
        [data, "kernel"] => println!("{:#?}", ImageStore::open(Path::new(data))?.kernel(&progress)?),
        [data, "initramfs", agent] => {
            let store = ImageStore::open(Path::new(data))?;
            let kernel = store.kernel(&progress)?;
            println!("{:#?}", store.initramfs(&kernel, Path::new(agent))?);
        }
        [data, "template", name] | [data, "template", name, "force"] => {
            let image = ImageStore::open(Path::new(data))?.build_template(name, args.len() == 4, &progress);
            let image = image.inspect_err(|e| println!("{}", e.detail().unwrap_or_default()))?;
            println!("{} {} {} bytes, {} packages", image.name, image.digest, image.bytes, image.packages.len());
        }
        [data, "list"] => {
            for image in ImageStore::open(Path::new(data))?.templates() {
                println!("{} {} {} bytes", image.name, image.digest, image.bytes);
            }
        }
        [data, "remove", name] => {
            println!("{}", ImageStore::open(Path::new(data))?.remove_template(&name.parse()?, &progress)?);
        }
        [data, "sweep"] => ImageStore::open(Path::new(data))?.sweep()?,
        _ => return Err("see the first lines of this example for its arguments".into()),
    }
    Ok(())
}

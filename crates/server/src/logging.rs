//! The log: structured lines on standard error.

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

use crate::config::LogFormat;

/// Sends the log to standard error. Does nothing when a log is set up already.
///
/// A filter that does not parse is replaced by `info`; the configuration refuses one before.
pub fn init(format: LogFormat, filter: &str) {
    let subscriber = subscriber(format, filter, std::io::stderr);
    let _ = tracing::subscriber::set_global_default(subscriber);
}

/// A log that is written to `writer`.
pub fn subscriber<W>(format: LogFormat, filter: &str, writer: W) -> Box<dyn tracing::Subscriber + Send + Sync>
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let filter = EnvFilter::try_new(filter).unwrap_or_else(|_| EnvFilter::new("info"));
    let base = tracing_subscriber::fmt().with_env_filter(filter).with_writer(writer).with_ansi(false);
    match format {
        LogFormat::Text => Box::new(base.finish()),
        LogFormat::Json => Box::new(base.json().flatten_event(true).finish()),
    }
}

//! Which driver the service runs over.

use crate::config::ServerConfig;
use crate::start::StartError;


//! The guest agent: PID 1 of the machine. Processes, files, and what is put right after a restore.

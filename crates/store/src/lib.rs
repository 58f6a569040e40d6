//! Durable state: machines, idempotency, keys. SQLite and PostgreSQL behind one set of statements.

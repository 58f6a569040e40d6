//! Composition root: configuration, authentication, verbs, reconcilers, HTTP.

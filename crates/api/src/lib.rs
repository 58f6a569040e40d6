//! HTTP wire types, the error body, and the OpenAPI document.

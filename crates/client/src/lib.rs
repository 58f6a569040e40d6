//! A thin HTTP client of the Mainbrella API.

//! How much memory large bodies take: alone in its process, so that nothing else is measured.
#![allow(clippy::unwrap_used)]

mod support;

use bytes::Bytes;
use http::Request;
use http_body_util::BodyExt as _;
use support::{App, Site};

#[tokio::test]
async fn bodies_of_any_size_pass_both_ways_without_being_held() {
    const SIZE: usize = 64 << 20;
    let site = Site::start(App::Count).await;
    let before = support::resident();
    let chunk = Bytes::from(vec![7u8; 64 * 1024]);
    let pieces = futures::stream::iter(
        (0..SIZE / chunk.len()).map(move |_| Ok::<_, std::io::Error>(http_body::Frame::data(chunk.clone()))),
    );
    let upload = http_body_util::StreamBody::new(pieces);
    let response = site.open(Request::post("/").header("host", site.host()).body(upload).unwrap()).await;
    let mut body = response.into_body();
    let (mut got, mut most) = (0, 0);
    while let Some(frame) = body.frame().await {
        got += frame.unwrap().into_data().map_or(0, |d| d.len());
        most = most.max(support::resident());
    }
    assert_eq!(got, SIZE, "everything came back");
    assert!(most.saturating_sub(before) < 24 << 20, "grew by {} MiB", most.saturating_sub(before) >> 20);
}

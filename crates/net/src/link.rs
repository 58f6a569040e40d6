//! Links, addresses and routes, over netlink, in the namespace of the calling thread.

use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::AsRawFd;

use futures::TryStreamExt as _;
use rtnetlink::packet_route::address::AddressAttribute;
use rtnetlink::packet_route::link::{InfoData, InfoVeth, LinkAttribute};
use rtnetlink::{Handle, LinkMessageBuilder, LinkUnspec, LinkVeth, RouteMessageBuilder, new_connection};

use crate::error::{NetError, io_error, link_error};
use crate::namespace::Namespace;

/// A netlink connection of the calling thread's namespace. Needs a runtime.
pub(crate) fn netlink() -> Result<Handle, NetError> {
    let (connection, handle, _) = new_connection().map_err(io_error("opening netlink"))?;
    tokio::spawn(connection);
    Ok(handle)
}

/// Number of the link `name`.
pub(crate) async fn index(netlink: &Handle, name: &str) -> Result<Option<u32>, NetError> {
    let mut found = netlink.link().get().match_name(name.to_owned()).execute();
    match found.try_next().await {
        Ok(link) => Ok(link.map(|l| l.header.index)),
        Err(rtnetlink::Error::NetlinkError(e)) if e.raw_code() == -libc::ENODEV => Ok(None),
        Err(e) => Err(link_error("looking for a link")(e)),
    }
}

pub(crate) async fn set_mac(netlink: &Handle, index: u32, mac: [u8; 6]) -> Result<(), NetError> {
    let change = LinkUnspec::new_with_index(index).address(mac.to_vec()).build();
    netlink.link().set(change).execute().await.map_err(link_error("setting a hardware address"))
}

pub(crate) async fn up(netlink: &Handle, index: u32) -> Result<(), NetError> {
    let change = LinkUnspec::new_with_index(index).up().build();
    netlink.link().set(change).execute().await.map_err(link_error("bringing a link up"))
}

pub(crate) async fn address(netlink: &Handle, index: u32, address: Ipv4Addr, prefix: u8) -> Result<(), NetError> {
    netlink.address().add(index, address.into(), prefix).execute().await.map_err(link_error("setting an address"))
}

/// The first address of a link.
pub(crate) async fn address_of(netlink: &Handle, index: u32) -> Result<Option<Ipv4Addr>, NetError> {
    let mut found = netlink.address().get().set_link_index_filter(index).execute();
    while let Some(message) = found.try_next().await.map_err(link_error("looking for an address"))? {
        for attribute in message.attributes {
            if let AddressAttribute::Address(IpAddr::V4(address)) = attribute {
                return Ok(Some(address));
            }
        }
    }
    Ok(None)
}

pub(crate) async fn default_route(netlink: &Handle, via: Ipv4Addr) -> Result<(), NetError> {
    let route = RouteMessageBuilder::<Ipv4Addr>::new().gateway(via).build();
    netlink.route().add(route).execute().await.map_err(link_error("setting the default route"))
}

/// Makes a pair of joined links: `name` here, `peer` in `there`. Made where its inner end belongs, it costs half a
/// millisecond; made elsewhere and moved, twenty.
pub(crate) async fn pair(netlink: &Handle, name: &str, peer: &str, there: &Namespace) -> Result<(), NetError> {
    let mut outer = LinkMessageBuilder::<LinkUnspec>::new().name(peer.to_owned()).build();
    outer.attributes.push(LinkAttribute::NetNsFd(there.fd().as_raw_fd()));
    let pair = LinkMessageBuilder::<LinkVeth>::new(name, peer).set_info_data(InfoData::Veth(InfoVeth::Peer(outer)));
    netlink.link().add(pair.build()).execute().await.map_err(link_error("making a pair of links"))
}

pub(crate) async fn remove(netlink: &Handle, index: u32) -> Result<(), NetError> {
    netlink.link().del(index).execute().await.map_err(link_error("removing a link"))
}

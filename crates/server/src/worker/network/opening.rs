//! Opening the network: endpoint, calls, the addresses of the other nodes, the threads.

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::mpsc::{self, Sender};
use std::sync::Arc;
use std::time::Duration;

use forebay_data::NodeTargets;
use forebay_fabric::libfabric::{LibfabricEndpoint, Settings};
use forebay_fabric::{secret_file, Calls, CallsSettings, Endpoint, Identity};
use forebay_types::{Code, Error, NodeId, Result};

use super::commands::Commands;
use super::kept::KeptOpen;
use super::met::MetNodes;
use super::target_selection::TargetNode;
use super::thread::{Member, NetworkThread};
use super::{io_workers, Network};
use crate::pool_file::Membership;
use crate::worker::handoff::Handoff;
use crate::worker::message::Message;
use crate::worker::statistics::Statistics;

/// The provider if the pool file names none: every host has it.
const DEFAULT_PROVIDER: &str = "tcp;ofi_rxm";
/// How long a node with new data waits for the reply of the root's node to its introduction. In a pool that starts,
/// that node may not be up yet. A later refusal ends the worker ([`Message::Unwelcome`]).
const INTRODUCTION: Duration = Duration::from_millis(250);

/// A host's address and port in the form of libfabric's providers over IP (`sockaddr_in`, `sockaddr_in6`).
fn encode(address: SocketAddr) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(28);
    match address {
        SocketAddr::V4(v4) => {
            bytes.extend((libc::AF_INET as u16).to_ne_bytes());
            bytes.extend(v4.port().to_be_bytes());
            bytes.extend(v4.ip().octets());
            bytes.extend([0; 8]);
        }
        SocketAddr::V6(v6) => {
            bytes.extend((libc::AF_INET6 as u16).to_ne_bytes());
            bytes.extend(v6.port().to_be_bytes());
            bytes.extend(v6.flowinfo().to_be_bytes());
            bytes.extend(v6.ip().octets());
            bytes.extend(v6.scope_id().to_ne_bytes());
        }
    }
    bytes
}

/// The first address of a host, preferably of the family of `like`.
fn resolve(host: &str, port: u16, like: Option<SocketAddr>) -> Result<SocketAddr> {
    let what = || format!("cannot find host {host}");
    let found = (host, port).to_socket_addrs().map_err(|e| {
        Error::new(Code::NotFound, what()).why(e).cure("correct its `host` in the pool file, or /etc/hosts")
    })?;
    let all: Vec<SocketAddr> = found.collect();
    let alike = all.iter().find(|a| like.is_none_or(|l| l.is_ipv4() == a.is_ipv4()));
    alike.or(all.first()).copied().ok_or_else(|| Error::new(Code::NotFound, what()).why("it has no address"))
}

/// The error of a node whose new data the root's node refused.
pub(in crate::worker) fn unwelcome(node: NodeId, why: String) -> Error {
    Error::new(Code::Stale, format!("cannot start as node {node}"))
        .why(why)
        .cure("if its data is lost, start it with --renumber (node 1: create the whole pool again)")
}

/// Opens this node's endpoint and starts the threads.
///
/// # Errors
/// A secret that cannot be used, a port that is taken, a provider that this node lacks, a host that has no address.
pub(in crate::worker) fn start(
    membership: &Membership,
    capacity_bytes: u64,
    targets: Arc<NodeTargets>,
    to_shard: Sender<Message>,
    handoff: &Arc<Handoff>,
    kept: KeptOpen,
    statistics: &Arc<Statistics>,
) -> Result<Network> {
    let me = membership.nodes.iter().find(|m| m.number == membership.node).ok_or_else(|| {
        Error::new(Code::Invalid, format!("node {} is not in its own pool file", membership.node))
    })?;
    let secret = secret_file::read(&membership.key)?;
    let here = resolve(&me.host, me.port, None)?;
    let settings = Settings {
        provider: Some(membership.provider.clone().unwrap_or_else(|| DEFAULT_PROVIDER.to_owned())),
        host: Some(here.ip().to_string()),
        port: Some(here.port()),
        peers_expected: membership.nodes.len(),
        ..Settings::default()
    };
    let endpoint = LibfabricEndpoint::open(settings).map_err(|e| {
        let what = format!("cannot listen at {here} for the other nodes: {}", e.what);
        Error::new(e.code, what).why(e.why).cure(
            "is the address one of this host's, and the port free? `host` and `port` in the pool file say which",
        )
    })?;
    if endpoint.address().len() != encode(here).len() {
        return Err(Error::new(
            Code::NotSupported,
            format!("cannot use provider {} between nodes yet", endpoint.provider()),
        )
        .why("its addresses are not IP addresses, and a pool file gives host and port")
        .cure("name tcp;ofi_rxm or verbs;ofi_rxm in the pool file"));
    }
    tracing::info!(
        "node {} of {} listens at {here} ({})",
        me.number,
        membership.nodes.len(),
        endpoint.provider()
    );
    let identity = Identity { pool: secret.pool(), node: NodeId(me.number), capacity_bytes };
    let settings = CallsSettings { data: Some(membership.data), ..CallsSettings::default() };
    let mut calls = Calls::new(Box::new(endpoint), identity, secret, settings);
    let mut met = MetNodes::read(&membership.dir)?;
    let known = |node, member: &crate::pool_file::Member| Member {
        node,
        name: member.name.clone(),
        host: member.host.clone(),
        media: member.media.clone(),
    };
    let mut members = vec![known(NodeId(me.number), me)];
    let mut target_nodes = vec![TargetNode { node: NodeId(me.number), targets: me.targets }];
    let mut all_found = true;
    for member in membership.nodes.iter().filter(|m| m.number != me.number) {
        let node = NodeId(met.number_now(member.number));
        members.push(known(node, member));
        target_nodes.push(TargetNode { node, targets: member.targets });
        // A host that cannot be resolved now does not prevent the contact with the others.
        let added = resolve(&member.host, member.port, Some(here)).and_then(|at| {
            met.set_address(member.number, &encode(at));
            calls
                .add_node(node, &encode(at))
                .map_err(|code| Error::new(code, format!("cannot use address {at} of node {}", member.name)))
        });
        if let Err(e) = added {
            tracing::error!("{e}");
            all_found = false;
        }
    }
    // Otherwise a node whose host cannot be resolved now can still send requests to this one.
    if all_found {
        calls.hear_only_nodes();
    }
    for (node, data) in met.all() {
        calls.expect_data(node, data);
    }
    let waker = calls.endpoint().waker().clone();
    let (sender, commands) = mpsc::channel();
    let to_me = Commands::new(sender, waker);
    let kept = Arc::new(kept);
    let io_worker = io_workers::IoWorker::new(Arc::clone(&targets), Arc::clone(&kept), to_me.clone());
    let jobs = io_workers::start(targets, Arc::clone(&kept), to_me.clone())?;
    let thread = NetworkThread::new(calls, NodeId(me.number), members, commands, to_shard, (jobs, kept));
    let thread = thread.with_statistics(Arc::clone(statistics));
    let thread = thread.with_io_worker(handoff.are_in_memory().then_some(io_worker));
    let (answer, answered) = mpsc::channel();
    let thread = thread.with_targets(target_nodes.clone());
    let thread = thread.with_met(met, membership.fresh.then_some((answer, membership.instead_of.is_some())));
    let thread = handoff.start_network(thread)?;
    let nodes = membership.nodes.len();
    let others =
        target_nodes.iter().map(|target_node| target_node.node).filter(|node| node.0 != me.number).collect();
    let node = NodeId(me.number);
    let mut network = Network { node, nodes, others, target_nodes, commands: to_me, thread: Some(thread) };
    if membership.fresh {
        if let Ok(Err(why)) = answered.recv_timeout(INTRODUCTION) {
            network.stop();
            return Err(unwelcome(NodeId(me.number), why));
        }
    }
    Ok(network)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encode_gives_what_the_kernel_calls_a_socket_address() {
        let v4 = encode("10.1.2.3:258".parse().unwrap());
        assert_eq!(v4, [2, 0, 1, 2, 10, 1, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0]);
        let v6 = encode("[::1]:258".parse().unwrap());
        assert_eq!(v6.len(), size_of::<libc::sockaddr_in6>());
        assert_eq!((v6[0], v6[2], v6[3], v6[23]), (10, 1, 2, 1));
    }

    #[test]
    fn resolve_of_an_unknown_host_names_it() {
        let error = resolve("no-such-host.invalid", 1, None).unwrap_err().to_string();
        assert!(error.contains("no-such-host.invalid") && error.contains("pool file"), "{error}");
    }
}

//! What the model considers besides its base.

/// What the model considers besides the paper's base.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extensions {
    /// Every run costs a latency, on the medium, in each stripe that it touches.
    pub runs: bool,
    /// Reads fetch small gaps too, and runs that do not combine are written one by one.
    pub sieving: bool,
    /// Messages on one node are cheaper than between nodes; a round has several exchanges of log2(ranks) steps.
    pub messages: bool,
    /// Runs on another node cost a request and the network, while the medium serves others.
    pub remote: bool,
    /// Several targets are accessed at the same time.
    pub targets: bool,
    /// Processes share a medium's bandwidth, and wait for each other's runs, only if they are more than it serves at a
    /// time. Ranks of a node share processors likewise.
    pub contention: bool,
    /// T_other: lists of runs, and copies between buffers.
    pub copies: bool,
}

impl Extensions {
    /// The paper's model.
    pub const NONE: Extensions = Extensions {
        runs: false,
        sieving: false,
        messages: false,
        remote: false,
        targets: false,
        contention: false,
        copies: false,
    };
    /// All extensions.
    pub const ALL: Extensions = Extensions {
        runs: true,
        sieving: true,
        messages: true,
        remote: true,
        targets: true,
        contention: true,
        copies: true,
    };
    /// The extensions by name.
    pub const NAMES: [&'static str; 7] =
        ["runs", "sieving", "messages", "remote", "targets", "contention", "copies"];

    /// All extensions but those of these names. None for an unknown name.
    pub fn without<'a>(names: impl IntoIterator<Item = &'a str>) -> Option<Extensions> {
        let mut used = Extensions::ALL;
        for name in names {
            *match name {
                "runs" => &mut used.runs,
                "sieving" => &mut used.sieving,
                "messages" => &mut used.messages,
                "remote" => &mut used.remote,
                "targets" => &mut used.targets,
                "contention" => &mut used.contention,
                "copies" => &mut used.copies,
                _ => return None,
            } = false;
        }
        Some(used)
    }
}

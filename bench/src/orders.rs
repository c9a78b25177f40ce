//! The parameters of a driver, which are the arguments of `forebay-bench drive`.

/// The parameters of a driver.
#[derive(Clone, Debug)]
pub(crate) struct Orders {
    /// The directory to work in; it exists and is empty.
    pub(crate) root: String,
    /// Number of processes.
    pub(crate) processes: usize,
    /// True if all processes share one directory or file.
    pub(crate) shared: bool,
    /// Files of each process.
    pub(crate) files: usize,
    /// Bytes of all processes together.
    pub(crate) bytes: usize,
    /// Bytes of one read or write.
    pub(crate) block: usize,
    /// True for blocks in a random order.
    pub(crate) random: bool,
}

impl Orders {
    /// As arguments of `forebay-bench drive`.
    pub(crate) fn arguments(&self, what: &str) -> Vec<String> {
        let mut all = vec!["drive".into(), what.into(), "--root".into(), self.root.clone()];
        let numbers = [
            ("--processes", self.processes),
            ("--shared", self.shared as usize),
            ("--files", self.files),
            ("--bytes", self.bytes),
            ("--block", self.block),
            ("--random", self.random as usize),
        ];
        for (name, value) in numbers {
            all.extend([name.to_owned(), value.to_string()]);
        }
        all
    }

    /// The orders that [`Orders::arguments`] made.
    pub(crate) fn parse(arguments: &[String]) -> Result<Orders, String> {
        let mut orders = Orders::default();
        for pair in arguments.chunks(2) {
            let [name, value] = pair else { return Err(format!("{} needs a value", pair[0])) };
            let number = || value.parse::<usize>().map_err(|_| format!("{name} {value}: not a number"));
            match name.as_str() {
                "--root" => orders.root = value.clone(),
                "--processes" => orders.processes = number()?,
                "--shared" => orders.shared = number()? != 0,
                "--files" => orders.files = number()?,
                "--bytes" => orders.bytes = number()?,
                "--block" => orders.block = number()?,
                "--random" => orders.random = number()? != 0,
                other => return Err(format!("there is no option {other}")),
            }
        }
        if orders.root.is_empty() {
            return Err("--root is needed".into());
        }
        Ok(orders)
    }
}

/// One process, no files, blocks of 1 MiB.
impl Default for Orders {
    fn default() -> Orders {
        Orders {
            root: String::new(),
            processes: 1,
            shared: true,
            files: 0,
            bytes: 0,
            block: 1 << 20,
            random: false,
        }
    }
}

# The project's jobs. Each first installs its missing dependencies (tools/install-deps).
#
#   make build                 release binaries and libraries
#   make demo                  unmodified programs on slow storage, directly and with a pool in front of it, compared
#   make test                  format, lints, arrows between crates, all tests, whole programs
#   make soak                  the same tests with more cases, for hours; SEEDS=20000 CASES=1000
#   make bench                 Forebay beside tmpfs, the disk and slow storage; QUICK=1, BENCH="SECTION ..." (docs/benchmarks.md)
#   make install PREFIX=DIR    bin, lib, include and share; DESTDIR=ROOT for packagers
#   make lint                  format and lints alone
#   make clean                 removes what the jobs made

PREFIX  ?= /usr/local
DESTDIR ?=
BENCH   ?= meta data stage cost mount mpi choice nodes
QUICK   ?=
SEEDS   ?= 20000
CASES   ?= 1000
CARGO   ?= cargo

TARGET_DIR := $(if $(CARGO_TARGET_DIR),$(CARGO_TARGET_DIR),$(CURDIR)/target)
RELEASE    := $(TARGET_DIR)/release
DEBUG      := $(TARGET_DIR)/debug

.PHONY: help build demo test soak bench install lint clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   make/  make/p' Makefile

build:
	@tools/install-deps build
	$(CARGO) build --release --workspace
	$(MAKE) -C mpi OUT=$(RELEASE)
	$(MAKE) -C nbd OUT=$(RELEASE)

# The dependencies of demo and benchmarks are installed before the build, since mpi/Makefile builds a driver for each
# installed MPI, and nbd/Makefile a plugin if nbdkit's header is installed.
demo:
	@tools/install-deps demo
	$(MAKE) build
	demo/run $(RELEASE)

lint:
	@tools/install-deps build
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings

# Libraries and binaries are built first: tests of whole programs run them from the directory of the test binaries.
test: lint
	@tools/install-deps test
	$(CARGO) build --workspace --features forebay-server/simulation,forebay-mover/simulation
	$(MAKE) -C mpi OUT=$(DEBUG)
	$(MAKE) -C nbd OUT=$(DEBUG)
	CARGO='$(CARGO)' tools/run-tests

# SEEDS: histories of the simulations (crates/fabric, tests/conformance). CASES: histories of each kind of transaction
# over several nodes (crates/meta). FOREBAY_SOAK: tests with killed or disturbed processes run longer.
soak:
	@tools/install-deps test
	$(CARGO) build --workspace --features forebay-server/simulation,forebay-mover/simulation
	$(MAKE) -C mpi OUT=$(DEBUG)
	$(MAKE) -C nbd OUT=$(DEBUG)
	CARGO='$(CARGO)' FOREBAY_SOAK=1 FOREBAY_SEEDS=$(SEEDS) FOREBAY_CASES=$(CASES) tools/run-tests

bench:
	@tools/install-deps bench
	$(MAKE) build
	$(RELEASE)/forebay-bench run --binaries $(RELEASE) --results bench/results $(if $(QUICK),--quick) $(BENCH)

install: build
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/lib $(DESTDIR)$(PREFIX)/include
	install -m 755 $(RELEASE)/forebay $(RELEASE)/forebayd $(RELEASE)/forebay-mount \
		$(RELEASE)/forebay-mover $(RELEASE)/forebay-register $(RELEASE)/forebay-emulate \
		$(RELEASE)/forebay-device $(DESTDIR)$(PREFIX)/bin/
	install -m 755 $(RELEASE)/libforebay.so $(RELEASE)/libforebay_preload.so $(DESTDIR)$(PREFIX)/lib/
	for library in $(RELEASE)/libforebay_mpi*.so; do \
		if [ -e "$$library" ]; then install -m 755 "$$library" $(DESTDIR)$(PREFIX)/lib/; fi; done
	if [ -e $(RELEASE)/nbdkit-forebay-plugin.so ]; then install -d $(DESTDIR)$(PREFIX)/lib/nbdkit/plugins; \
		install -m 755 $(RELEASE)/nbdkit-forebay-plugin.so $(DESTDIR)$(PREFIX)/lib/nbdkit/plugins/; fi
	install -m 644 crates/capi/include/forebay.h crates/capi/include/forebay.f90 $(DESTDIR)$(PREFIX)/include/
	install -d $(DESTDIR)$(PREFIX)/share/man/man1 $(DESTDIR)$(PREFIX)/share/man/man3
	install -d $(DESTDIR)$(PREFIX)/share/man/man5 $(DESTDIR)$(PREFIX)/share/man/man8
	install -m 644 docs/man/*.1 $(DESTDIR)$(PREFIX)/share/man/man1/
	install -m 644 docs/man/*.3 $(DESTDIR)$(PREFIX)/share/man/man3/
	for page in docs/man/forebay_*.3; do \
		for name in $$(sed -n '/^\.SH NAME/{n;s/ .-.*//;s/,//g;p}' $$page); do \
			[ -e docs/man/$$name.3 ] || \
				echo ".so man3/$${page##*/}" >$(DESTDIR)$(PREFIX)/share/man/man3/$$name.3 || exit 1; \
		done; done
	install -m 644 docs/man/*.5 $(DESTDIR)$(PREFIX)/share/man/man5/
	install -m 644 docs/man/*.8 $(DESTDIR)$(PREFIX)/share/man/man8/
	install -d $(DESTDIR)$(PREFIX)/share/doc/forebay
	install -m 644 README.md ARCHITECTURE.md LICENSE-APACHE LICENSE-MIT docs/*.md docs/*.svg $(DESTDIR)$(PREFIX)/share/doc/forebay/
	install -d $(DESTDIR)$(PREFIX)/share/forebay/slurm
	install -m 644 slurm/burst_buffer.lua slurm/burst_buffer.conf slurm/forebay.toml $(DESTDIR)$(PREFIX)/share/forebay/slurm/
	install -m 755 slurm/prolog slurm/epilog $(DESTDIR)$(PREFIX)/share/forebay/slurm/
# slurmd and slurmctld start them with a PATH of their own, which need not have the prefix.
	sed -i 's|exec forebay |exec $(PREFIX)/bin/forebay |; s|or "forebay"$$|or "$(PREFIX)/bin/forebay"|' \
		$(addprefix $(DESTDIR)$(PREFIX)/share/forebay/slurm/,prolog epilog burst_buffer.lua)
	install -d $(DESTDIR)$(PREFIX)/share/bash-completion/completions
	install -d $(DESTDIR)$(PREFIX)/share/zsh/site-functions $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d
	$(RELEASE)/forebay completions bash >$(DESTDIR)$(PREFIX)/share/bash-completion/completions/forebay
	$(RELEASE)/forebay completions zsh >$(DESTDIR)$(PREFIX)/share/zsh/site-functions/_forebay
	$(RELEASE)/forebay completions fish >$(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/forebay.fish

clean:
	$(CARGO) clean
	rm -rf demo-data bench/results

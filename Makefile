# Everything a developer runs. `make` alone lists the targets.
# Needed: Python 3.11 or newer, make, a C compiler. All else goes into .venv.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest

# Tests start hundreds of nodes and commands. Where the environment forbids cached bytecode each of
# them would compile all of Penstock anew, which takes half of a node's start.
unexport PYTHONDONTWRITEBYTECODE

# Passed on to what is run: make demo ARGS=--help
ARGS ?=

PROTO_FILES   := $(wildcard proto/penstock/v1/*.proto)
SERVICE_FILES := $(shell grep -l '^service ' $(PROTO_FILES))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# What is asked for in one call is done in its order. This would hold for a make within make too,
# where `test` wants two things beside each other.
ifeq ($(MAKELEVEL),0)
.NOTPARALLEL:
endif
.PHONY: help venv install install-broker demo demo-log demo-pipeline demo-metrics test lint types format test-unit \
	test-simulation test-integration test-integration-brokers test-integration-clients test-chaos \
	test-pipeline test-pipeline-programs test-pipeline-queries proto proto-check bench-failover \
	bench-group-failover bench-idle bench-quorum bench-controller-failover bench-metadata \
	bench-latency bench-catch-up bench-throughput \
	bench-recovery bench-partitions bench-scrape bench-tls bench-codec bench-converters bench-client bench-consume bench-transactions bench-pipeline soak \
	transaction-soak bench-chaos-checking chaos-bugs \
	pipeline-crashes kill-loop fuzz-codec flip-loop sim sim-mutants image test-docker test-kubernetes deploy-rules upgrade build clean distclean

help: ## List the targets
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  %-26s %s\n", $$1, $$2 }' \
		$(MAKEFILE_LIST)

# --- Setting up -----------------------------------------------------------------------------------
# The marker files make an install run again when what is built or installed by it has changed.
BUILT_FROM := pyproject.toml hatch_build.py proto/penstock/wire/_codec.pyx proto/penstock/wire/_intake.pxi

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Penstock needs Python 3.11 or newer, but '$(PYTHON)' is" \
			"$$($(PYTHON) --version 2>&1). Name another: make PYTHON=python3.12 ..." >&2; \
		exit 1; }
	@echo "Making the virtual environment $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { \
		rm -rf $(VENV); \
		echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu install python3-venv." >&2; \
		exit 1; }

$(VENV)/.installed-broker: $(BUILT_FROM) | $(BIN)/python
	@echo "Installing Penstock with its broker and command"
	@$(PIP) --editable '.[broker]'
	@touch $@

$(VENV)/.installed-demo: $(VENV)/.installed-broker
	@echo "Installing Spark, and a Java for where there is none (about 600 MB)"
	@$(PIP) --editable '.[broker,pipeline,java]'
	@touch $@

$(VENV)/.installed-plot: $(VENV)/.installed-demo
	@echo "Installing what draws"
	@$(PIP) --editable '.[broker,pipeline,java,plot]'
	@touch $@

$(VENV)/.installed-proto-tools: proto/requirements.txt | $(BIN)/python
	@echo "Installing what generates code from .proto files"
	@$(BIN)/python -m venv $(VENV)/proto-tools
	@$(VENV)/proto-tools/bin/python -m pip install --quiet --disable-pip-version-check \
		--requirement proto/requirements.txt
	@touch $@

$(VENV)/.installed-dev: $(BUILT_FROM) $(VENV)/.installed-proto-tools | $(BIN)/python
	@echo "Installing Penstock with what its development needs"
	@$(PIP) --editable '.[dev]'
	@touch $(VENV)/.installed-broker $(VENV)/.installed-demo $(VENV)/.installed-plot $@

venv: $(BIN)/python ## Make the virtual environment, with nothing in it

install-broker: $(VENV)/.installed-broker ## Install Penstock alone into .venv: nodes, clients, the command

install: $(VENV)/.installed-dev ## Install all that development needs into .venv

# --- Running --------------------------------------------------------------------------------------

demo: demo-log demo-pipeline ## Run a real log through nodes and Spark while nodes are killed

demo-log: $(VENV)/.installed-broker ## Of the demo the log alone: needs no Spark
	@$(BIN)/python -m penstock.cli.demo $(ARGS)

demo-pipeline: $(VENV)/.installed-demo ## Of the demo the pipeline alone: needs Spark
	@$(BIN)/python examples/pipelines/access_log/demo.py $(ARGS)

# The whole benchmark, and another series: make demo-metrics ARGS="--data DIRECTORY --series taxi"
demo-metrics: $(VENV)/.installed-plot ## Flag anomalies of metrics, and draw them in metrics.png
	@$(BIN)/python examples/pipelines/cloud_metrics/demo.py --plot metrics.png $(ARGS)

bench-failover: $(VENV)/.installed-dev ## Measure how long writes stall when a leader is killed
	@$(BIN)/python bench/failover.py $(ARGS)

bench-group-failover: $(VENV)/.installed-dev ## Measure what a group's partitions wait when a member dies
	@$(BIN)/python bench/group_failover.py $(ARGS)

bench-idle: $(VENV)/.installed-dev ## Measure CPU and memory of three nodes at rest
	@$(BIN)/python bench/idle.py $(ARGS)

bench-quorum: $(VENV)/.installed-dev ## Measure what a commit costs in the metadata quorum
	@$(BIN)/python bench/quorum_commit.py $(ARGS)

bench-controller-failover: $(VENV)/.installed-dev ## Measure how long metadata stall when a node dies
	@$(BIN)/python bench/controller_failover.py $(ARGS)

bench-metadata: $(VENV)/.installed-dev ## Measure controllers with up to 100,000 partitions
	@$(BIN)/python bench/metadata_scale.py $(ARGS)

bench-latency: $(VENV)/.installed-dev ## Measure how long acks=all takes at a steady rate
	@$(BIN)/python bench/produce_latency.py $(ARGS)

bench-catch-up: $(VENV)/.installed-dev ## Measure what copying partitions costs those who write
	@$(BIN)/python bench/catch_up.py $(ARGS)

bench-throughput: $(VENV)/.installed-dev ## Measure the bytes a second of one and three brokers
	@$(BIN)/python bench/throughput.py $(ARGS)

bench-recovery: $(VENV)/.installed-dev ## Measure the start of a broker that holds a log of 10 GB
	@$(BIN)/python bench/log_recovery.py $(ARGS)

bench-partitions: $(VENV)/.installed-dev ## Measure 1,000 partitions at rest, and a node's restart
	@$(BIN)/python bench/many_partitions.py $(ARGS)

bench-scrape: $(VENV)/.installed-dev ## Measure a scrape of 1,000 partitions, and what it holds up
	@$(BIN)/python bench/scrape.py $(ARGS)

bench-tls: $(VENV)/.installed-dev ## Measure what TLS costs on producing and on a commit
	@$(BIN)/python bench/tls.py $(ARGS)

bench-codec: $(VENV)/.installed-dev ## Measure what a record costs to encode and to decode
	@$(BIN)/python bench/codec.py $(ARGS)

bench-converters: $(VENV)/.installed-dev ## Measure what a row costs to read from Avro
	@$(BIN)/python bench/converters.py $(ARGS)

bench-client: $(VENV)/.installed-dev ## Measure every way to write and read against its goals
	@$(BIN)/python bench/client.py $(ARGS)

bench-consume: $(VENV)/.installed-dev ## Measure the records a second that a consumer hands out
	@$(BIN)/python bench/consume.py $(ARGS)

bench-chaos-checking: $(VENV)/.installed-dev ## Measure how long the chaos harness judges 5 million records
	@$(BIN)/python bench/chaos_checking.py $(ARGS)

chaos-bugs: $(VENV)/.installed-dev ## Put known bugs in, and see the chaos harness find each within its budget
	@$(BIN)/python bench/chaos_bugs.py $(ARGS)

bench-pipeline: $(VENV)/.installed-dev ## Measure rows a second, micro-batches and memory of Spark
	@$(BIN)/python bench/pipeline.py $(ARGS)

bench-transactions: $(VENV)/.installed-dev ## Measure what transactions cost who writes and reads them
	@$(BIN)/python bench/transactions.py $(ARGS)

# --- Checking -------------------------------------------------------------------------------------

# Two parts at a time, for there are tests with time limits in all of them, and machines with two
# cores; the longest come first, so that none is left to run alone for long. A part that fails does
# not keep the others from being run.
test: lint types ## Run every check and test there is
	@$(MAKE) --keep-going --jobs=2 --output-sync=target test-integration-clients test-unit test-pipeline-queries \
		test-pipeline-programs test-integration-brokers test-simulation

lint: $(VENV)/.installed-dev proto-check ## Check style, formatting, layering and generated code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

types: $(VENV)/.installed-dev ## Check types (mypy, strict)
	$(BIN)/mypy

format: $(VENV)/.installed-dev ## Format the code and mend what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

NO_UNITS := tests/simulation tests/integration tests/pipeline tests/docker tests/kubernetes

test-unit: $(VENV)/.installed-dev ## Run the unit, typing, tidiness and packaging tests
	$(PYTEST) tests $(NO_UNITS:%=--ignore=%) --basetemp=$(VENV)/unit-tmp $(ARGS)

test-simulation: $(VENV)/.installed-dev ## Run the seeded simulations of whole clusters
	$(PYTEST) tests/simulation --basetemp=$(VENV)/simulation-tmp $(ARGS)

# Runs of the harness under each of its loads and families of faults: they take the whole machine.
CHAOS_RUNS := $(patsubst %,tests/integration/chaos/test_%.py,nemeses topic_workloads workloads)
BROKERS_HALF := tests/integration/broker tests/integration/bench

test-integration: $(VENV)/.installed-dev ## Run the tests that start real nodes on loopback
	$(PYTEST) tests/integration $(CHAOS_RUNS:%=--ignore=%) $(ARGS)

test-integration-brokers: $(VENV)/.installed-dev ## Of these the half of brokers and benchmarks
	$(PYTEST) $(BROKERS_HALF) --basetemp=$(VENV)/brokers-tmp $(ARGS)

test-integration-clients: $(VENV)/.installed-dev ## Of these all others
	$(PYTEST) tests/integration $(BROKERS_HALF:%=--ignore=%) $(CHAOS_RUNS:%=--ignore=%) \
		--basetemp=$(VENV)/clients-tmp $(ARGS)

test-chaos: $(VENV)/.installed-dev ## Run the harness's loads and families of faults on real nodes
	$(PYTEST) $(CHAOS_RUNS) $(ARGS)

# Half of what a short program on Spark takes is its JVM loading classes. An archive of them is mapped
# instead, by whichever JVM it fits; the others do without, and say nothing of it.
SPARK_CLASSES := $(VENV)/spark-classes.jsa
$(SPARK_CLASSES): tests/pipeline/class_archive.py $(VENV)/.installed-dev
	$(BIN)/python -m tests.pipeline.class_archive $@

SPARK_PYTEST := SPARK_SUBMIT_OPTS="-XX:SharedArchiveFile=$(abspath $(SPARK_CLASSES)) -Xlog:cds=off \
	-Xlog:cds+dynamic=off" $(PYTEST)

test-pipeline: $(SPARK_CLASSES) ## Run the tests that start Spark
	$(SPARK_PYTEST) tests/pipeline --basetemp=$(VENV)/pipeline-tmp $(ARGS)

SPARK_PROGRAMS := $(patsubst %,tests/pipeline/test_%.py,access_log benchmark cloud_metrics cluster \
	declarative declarative_topics example_programs guide messaging_kill messaging_tls running sink_killed)

test-pipeline-programs: $(SPARK_CLASSES) ## Of these the programs with a Spark of their own
	$(SPARK_PYTEST) $(SPARK_PROGRAMS) --basetemp=$(VENV)/programs-tmp $(ARGS)

test-pipeline-queries: $(SPARK_CLASSES) ## Of these all others, on one session
	$(SPARK_PYTEST) tests/pipeline $(SPARK_PROGRAMS:%=--ignore=%) --basetemp=$(VENV)/queries-tmp $(ARGS)

# Outside of `test`: it wants an engine, and an image (`make image`), and skips without them.
test-docker: $(VENV)/.installed-dev ## Run the tests that start nodes in containers
	$(PYTEST) tests/docker $(ARGS)

# Outside of `test`: it wants a cluster to be tested on (KUBECONFIG) whose hosts have an image
# (PENSTOCK_TEST_IMAGE), and skips where these are not named.
test-kubernetes: $(VENV)/.installed-dev ## Run the tests on the Kubernetes that KUBECONFIG names
	$(PYTEST) tests/kubernetes $(ARGS)

# Drivers, workers and brokers killed while queries write: make pipeline-crashes ROUNDS=20 SEED=7
pipeline-crashes: $(VENV)/.installed-dev ## Kill drivers, workers and brokers under Spark's sink
	@$(BIN)/python -m tests.pipeline.crash_loop --rounds $(ROUNDS) --seed $(SEED) $(ARGS)

# Nodes killed and started again under load: make kill-loop ROUNDS=100 SEED=7
ROUNDS     ?= 30
SEED       ?= 1

# Writers, a group whose members come and go, nodes killed: make soak SECONDS=60 ARGS=--json
SECONDS    ?= 600

soak: $(VENV)/.installed-dev ## Write and read for ten minutes while members and nodes die
	@$(BIN)/python bench/soak.py --seconds $(SECONDS) $(ARGS)

# Transactions while nodes and clients are killed: make transaction-soak ARGS="--transactions 2000 --json"
transaction-soak: $(VENV)/.installed-dev ## Commit 100,000 transactions while nodes and clients die
	@$(BIN)/python bench/transaction_soak.py $(ARGS)

kill-loop: $(VENV)/.installed-dev ## Kill real nodes in a loop under load, and check every record
	KILL_ROUNDS=$(ROUNDS) KILL_SEED=$(SEED) $(PYTEST) -x tests/integration/broker/test_kill_loop.py $(ARGS)

# The same with bits that flip on the disk of who is killed: make flip-loop ROUNDS=9 SEED=7 BITS=5
BITS       ?= 3

flip-loop: $(VENV)/.installed-dev ## The same while bits flip on the disks of those nodes
	FLIP_ROUNDS=$(ROUNDS) FLIP_SEED=$(SEED) FLIP_BITS=$(BITS) $(PYTEST) -x tests/integration/broker/test_flip_loop.py $(ARGS)

# Thousands of seeds of the simulators: make sim SEEDS=5000 SEED_START=0 JOBS=2
SIM        ?= all
SEEDS      ?= 1000
SEED_START ?= 0
JOBS       ?= 1

SIMULATE := $(BIN)/python -m tests.simulation

sim: $(VENV)/.installed-dev ## Run seeds of the simulators (SIM=cluster|transactions|quiet|quorum|all, ...)
	@$(SIMULATE) --sim $(SIM) --start $(SEED_START) --seeds $(SEEDS) --jobs $(JOBS) $(ARGS)

sim-mutants: $(VENV)/.installed-dev ## Leave out each rule that simulators know, and see it noticed
	@$(SIMULATE) --mutants --sim $(SIM) --start $(SEED_START) --seeds $(SEEDS) --jobs $(JOBS) $(ARGS)

fuzz-codec: $(VENV)/.installed-dev ## Hammer the compiled codec under an address sanitiser (ROUNDS, SEED)
	@$(BIN)/python -m tests.fuzzing --rounds $(ROUNDS) --seed $(SEED)

# From the build of a revision to this one: make upgrade UPGRADE_FROM=v0.1.0
upgrade: $(VENV)/.installed-dev ## Replace the software of nodes under load, from UPGRADE_FROM on
	UPGRADE_FROM=$(or $(UPGRADE_FROM),HEAD~1) $(PYTEST) tests/integration/operating/test_upgrade.py $(ARGS)

# --- Generated code -------------------------------------------------------------------------------
# By the tools of proto/requirements.txt. Protos without a service get no gRPC files.
PROTO_BIN := $(VENV)/proto-tools/bin

define generate
PATH="$(CURDIR)/$(PROTO_BIN):$$PATH" $(PROTO_BIN)/python -m grpc_tools.protoc --proto_path=proto \
	--python_out=$(1) --mypy_out=quiet:$(1) $(PROTO_FILES)
PATH="$(CURDIR)/$(PROTO_BIN):$$PATH" $(PROTO_BIN)/python -m grpc_tools.protoc --proto_path=proto \
	--grpc_python_out=$(1) --mypy_grpc_out=quiet:$(1) $(SERVICE_FILES)
endef

proto: $(VENV)/.installed-dev ## Generate the protocol's code anew
	@rm -f proto/penstock/v1/*_pb2.py proto/penstock/v1/*_pb2.pyi \
		proto/penstock/v1/*_pb2_grpc.py proto/penstock/v1/*_pb2_grpc.pyi
	@$(call generate,proto)

proto-check: $(VENV)/.installed-dev ## Check that the committed generated code is fresh
	@rm -rf build/proto-check
	@mkdir -p build/proto-check
	@$(call generate,build/proto-check)
	@diff --recursive --unified=1 --exclude=__pycache__ --exclude='*.proto' --exclude=__init__.py \
		--exclude=py.typed build/proto-check/penstock/v1 proto/penstock/v1 || { \
		echo "The generated code is not that of the .proto files; run 'make proto'." >&2; \
		exit 1; }

# --- Packaging ------------------------------------------------------------------------------------

build: $(VENV)/.installed-dev ## Build the wheel and the source distribution into dist/
	$(BIN)/python -m hatchling build

# The image of a node: make image BASE=penstock-base:bookworm. Wheels are built (or fetched) here, by
# .venv's Python, and the build of the image fetches nothing; BASE has the same Python.
IMAGE ?= penstock:latest
# What of Penstock is in it: `broker,chaos` for a pod that runs `penstock chaos`.
EXTRAS ?= broker
BASE  ?= python:$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')-slim-bookworm

build/image/.fetched-$(EXTRAS): pyproject.toml $(VENV)/.installed-dev
	@rm -rf build/image
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-build-isolation \
		--wheel-dir build/image/wheels '.[$(EXTRAS)]' pip
	@touch $@

image: build/image/.fetched-$(EXTRAS) ## Build the container image (BASE=..., IMAGE=..., EXTRAS=...)
	@rm -f build/image/wheels/penstock-*.whl
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps \
		--wheel-dir build/image/wheels .
	docker build --file deploy/docker/Dockerfile --tag $(IMAGE) --build-arg BASE=$(BASE) --build-arg EXTRAS=$(EXTRAS) \
		--build-arg VERSION=$$($(BIN)/python -c 'import importlib.metadata as m; print(m.version("penstock"))') \
		--build-arg REVISION=$$(git rev-parse HEAD 2> /dev/null || echo unknown) .

deploy-rules: $(VENV)/.installed-dev ## Put deploy/monitoring's alerts into what Kubernetes is given
	@$(BIN)/python deploy/rules.py

clean: ## Remove what was built and cached, but not .venv
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## Remove .venv too
	rm -rf $(VENV)

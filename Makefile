# Two commands do everything, set-up included, on a fresh Debian 12 or Ubuntu 24.04:
#
#   make demo    builds lmhead and trains a small model's head over gRPC on real text
#   make test    checks, release build and its tests, sanitizer build and its tests
#
# Helpers: make setup | build | lint | format | portable | package | clean. Each assumes `make setup` was run once.

SHELL := /bin/bash
.NOTPARALLEL:
.PHONY: help demo test setup build lint format portable package clean

STAGE := .ci/stage.sh
JOBS ?= $(shell nproc)
# Tests that need a GPU carry the label gpu.
GPU_FILTER := $(shell nvidia-smi -L >/dev/null 2>&1 || echo -LE gpu)
CTEST := ctest --output-on-failure --no-tests=error -j $(JOBS) $(GPU_FILTER)

help:
	@sed -n 's/^#   //p' $(MAKEFILE_LIST)

demo:
	@$(STAGE) "set-up" .ci/setup.sh build
	@$(STAGE) "configure" cmake --preset release --log-level=WARNING
	@$(STAGE) "build" cmake --build --preset release -j $(JOBS) --target lmhead
	@$(STAGE) "demo" build/bin/lmhead demo

test:
	@$(STAGE) "set-up" .ci/setup.sh all
	@$(STAGE) "lint" .ci/lint.sh
	@$(STAGE) "configure release" cmake --preset release --log-level=WARNING
	@$(STAGE) "build release" cmake --build --preset release -j $(JOBS)
	@$(STAGE) "tests" $(CTEST) --preset release
	@$(STAGE) "clang-tidy" .ci/clang_tidy.sh build
	@$(STAGE) "configure asan" cmake --preset asan --log-level=WARNING
	@$(STAGE) "build asan" cmake --build --preset asan -j $(JOBS)
	@$(STAGE) "tests with asan" $(CTEST) --preset asan

setup:
	@.ci/setup.sh all

build:
	@cmake --preset release --log-level=WARNING
	@cmake --build --preset release -j $(JOBS)

lint:
	@.ci/lint.sh

format:
	@git ls-files -z '*.h' '*.cc' '*.c' '*.cu' '*.cuh' | xargs -0 -r clang-format-14 -i

portable:
	@cmake --preset portable --log-level=WARNING
	@cmake --build --preset portable -j $(JOBS)

package: build
	@cd build && cpack

clean:
	@rm -rf build

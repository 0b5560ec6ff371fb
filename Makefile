# make check   lint, types, import contracts, fast tests          make test    all that CI runs
# make soak    the long campaigns whole (hours)                   make bench   the figures of benchmarks/README.md
python = $${MQFS_VENV:-.venv}/bin/python
slow = tests/spark_cluster tests/fuse tests/interop tests/server tests/docs tests/examples tests/tools tests/bench

check: setup
	$(python) -m pytest -q $(addprefix --ignore=,$(slow))

test:
	script/test

soak:
	MQFS_SOAK=1 script/test

bench: setup
	@script/setup bench
	for bench in benchmarks/[a-z]*.py; do $(python) "$$bench" || exit 1; done

setup:
	@script/setup test

.PHONY: check test soak bench setup

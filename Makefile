# make check   lint, types, import contracts, fast tests          make test    all that CI runs
# make bench-aims [PIN=0]   every aim with its peer in one table, in some ten minutes; PIN: all on that CPU
# make soak    the long campaigns whole (hours)                   make bench   the figures of benchmarks/README.md
python = $${MQFS_VENV:-.venv}/bin/python

# Installs by pip only. What it runs starts no server and mounts nothing.
check:
	@script/setup check
	$(python) -m pytest -q -n $$(nproc) --dist loadscope --no-loadscope-reorder -m "house or not (fuse or process or spark or slow or root)"

test:
	script/test

soak:
	MQFS_SOAK=1 script/test -n0

bench:
	@script/setup test
	@script/setup bench
	for bench in benchmarks/[a-z]*.py; do $(python) "$$bench" || exit 1; done

bench-aims:
	@script/setup test
	@script/setup bench
	$(if $(PIN),taskset -c $(PIN)) $(python) benchmarks/aims.py

.PHONY: check test soak bench bench-aims

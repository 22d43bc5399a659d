# `make run` compares methods and writes reports; `make test` runs all checks. Both create .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)

.PHONY: run test test-slow bench soak docs pictures papers dist clean

RUNS := runs/make-run

# Should four hospitals federate? Then seven methods on 20 artificial clients.
run: $(VENV)/installed
	rm -rf $(RUNS)
	$(BIN)/fedtailor compare local fedavg fedrep ditto --data heart --network logistic --network.intercept_head true \
		--metrics auc,accuracy --rounds 20 --batch-size 16 --evaluate-every 5 --folds 5 --repeats 4 \
		--out $(RUNS)/hospitals
	$(BIN)/fedtailor report $(RUNS)/hospitals --out $(RUNS)/hospitals.html
	$(BIN)/fedtailor compare local fedavg fedper fedapa fedapm fedlag selffl --data digits --data.clients 20 \
		--data.alpha 0.1 --rounds 20 --batch-size 16 --seeds 0,1,2 --out $(RUNS)/digits
	$(BIN)/fedtailor report $(RUNS)/digits --out $(RUNS)/digits.html

# one thread per process, because pytest uses all cores
test test-slow: export OMP_NUM_THREADS = 1

test: $(VENV)/installed-all
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -n auto --dist worksteal

# browser tests save screenshots in artifacts/, or in $$FEDTAILOR_ARTIFACTS
test-slow: $(VENV)/installed-all
	$(BIN)/pytest -m slow -n auto --dist worksteal

bench: $(VENV)/installed-all
	$(BIN)/python benchmarks/engines.py
	$(BIN)/python benchmarks/user_time.py
	$(BIN)/python benchmarks/population.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/server.py
	$(BIN)/python benchmarks/federation.py

# the documentation site, in build/docs/html; tutorials are executed, and their outputs are kept for the next build
docs: export OMP_NUM_THREADS = 1
docs: export PATH := $(CURDIR)/$(BIN):$(PATH)
docs: $(VENV)/installed-all
	$(BIN)/python docs/site/pages.py build/docs/source
	rm -rf build/docs/html
	$(BIN)/sphinx-build -a -W --keep-going -q -c docs/site -d build/docs/cache build/docs/source build/docs/html
	@echo "Open build/docs/html/index.html"

pictures: $(VENV)/installed-all
	$(BIN)/python docs/pictures.py
	$(BIN)/python docs/screens.py
	$(BIN)/python -m fedtailor.methods.catalog > docs/methods/index.md

# half an hour of kills, cuts, and slow links in a federation of real processes; the result is kept in benchmarks/results
soak: $(VENV)/installed-all
	PYTHONPATH=tests $(BIN)/python benchmarks/soak.py

# the verdicts, tables, and pictures of docs/papers, from results/papers
papers: $(VENV)/installed-all
	$(BIN)/python docs/paper_pages.py

# dist/: the source distribution, and the wheel that is built from it
dist: $(VENV)/installed-all
	rm -rf dist
	$(BIN)/python -m build --no-isolation

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e .
	touch $@

$(VENV)/installed-all: $(VENV)/installed
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) artifacts dist

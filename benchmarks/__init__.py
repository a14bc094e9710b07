"""Measurements of `jttt` beside what a user would run instead.

Each command is a module: `python -m benchmarks.gradgrad --help`. What they share:

* `workload`: the attention problems, the passes that are timed, and their operation counts;
* `harness`: how a pass is timed, and how a run is described, printed and saved;
* `compiling`: how a run of many programs compiles them side by side;
* `accuracy`: how far a result is from the same computation in float64;
* `peers`: other libraries' attention; `plots`: the pictures of a sweep.

Run them from the root of a checkout; results that are kept live in `benchmarks/results`.
"""

"""MEASURES: each part of Di-PS beside what it must reach (design.md's table of speed), as ratios of one run.

python -m benchmarks.kernels [--quick] [--json FILE] [--log]      one of them
python -m benchmarks [--quick] [--log]                            all of them, as `make bench` does
"""

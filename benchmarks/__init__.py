"""MEASURES: each part of Di-PS beside what it must reach (docs/architecture.md#speed), as ratios of one run.

python -m benchmarks.kernels [--quick] [--json FILE] [--log]      one of them
python -m benchmarks [--quick] [--log]                            all of them, as `make bench` does
"""

"""What ``bench_gpu.py`` measures on a GPU, a piece at a time; in small, each runs on a CPU."""

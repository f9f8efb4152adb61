"""What the kernels' benchmark runs: contestants for every operator, and the clock."""

"""What serves a developer of kernels on any machine: audit, bench, doctor, profile, smem, smoke, verify."""

"""Tools for kernel developers that run on any machine: audit, bench, doctor, profile, smem, smoke, verify."""

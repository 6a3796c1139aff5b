"""Where a wheel came from and where it runs: provenance, reproduction, compatibility, and CI's jobs."""

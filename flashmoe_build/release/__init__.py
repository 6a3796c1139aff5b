"""Where a wheel came from and where it runs: provenance, reproduction, compatibility, CI's jobs."""

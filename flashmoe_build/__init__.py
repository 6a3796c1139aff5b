"""Build-time programs: tables to sources, NVRTC, the host compiler, the wheel. Not part of the wheel."""

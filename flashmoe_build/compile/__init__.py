"""From the tables to a wheel's library: generated sources, NVRTC, ptxas, g++ and the cache."""

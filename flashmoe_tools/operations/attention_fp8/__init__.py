"""Dense attention whose q, k and v are float8_e4m3fn."""

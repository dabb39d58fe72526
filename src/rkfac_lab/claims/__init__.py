"""The paper's claims, re-measured: one page each, made by one command."""

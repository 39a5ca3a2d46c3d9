"""One module a command of `divopd`; each has ``main(argv) -> int``."""

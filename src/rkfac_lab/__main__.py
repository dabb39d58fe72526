"""`python -m rkfac_lab` is the `rkfac` command."""

from rkfac_lab.entry import main

if __name__ == "__main__":
    main()

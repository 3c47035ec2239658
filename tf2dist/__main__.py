"""``python -m tf2dist``."""

from tf2dist.cli import main

if __name__ == "__main__":
    main()

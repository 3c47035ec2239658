"""``python -m tf2dist`` and the command ``tf2dist``."""

from typing import NoReturn

from tf2dist import signals


def main() -> NoReturn:
    signals.end_at_once()
    from tf2dist import cli  # importing takes a while, and signals may come meanwhile

    cli.main()


if __name__ == "__main__":
    main()

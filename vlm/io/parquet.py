"""The optional package that reads and writes Parquet."""

from vlm.errors import UserError


def require_pyarrow(what: str) -> None:
    """Checks that pyarrow is installed.

    Args:
        what: The file or option that needs it, for the message.
    Raises:
        UserError: It is not installed; the message says how to install it.
    """
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as fault:
        raise UserError(f'{what}: needs the package pyarrow; pip install "vlm-lightning[parquet]"') from fault

"""Numbers with a noun, as in "2 blocks"."""


def counted(number: int, noun: str) -> str:
    """
    >>> counted(1, "block"), counted(2, "entry")
    ('1 block', '2 entries')
    """
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun[:-1]}ies" if noun.endswith("y") else f"{number} {noun}s"

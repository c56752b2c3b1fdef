"""The functions under `hg.`: the array API's names and rules, lowered to the op table."""

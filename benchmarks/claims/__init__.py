"""Ties every measured number in a document to the record that it comes from.

A number that a document states is listed here with the record and with how it follows from it;
`tests/contract/test_claims.py` computes it again. A number with a unit that nothing lists fails that test, unless
`not_measured.py` says what else it is.
"""

"""Conversations: identity, addresses, index, placement, ledger."""

"""The dry run as the ledger's referee: both count the same candidates, and every difference is shown."""

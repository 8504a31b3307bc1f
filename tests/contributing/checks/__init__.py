"""What must hold in a tree to which the recipes of CONTRIBUTING.md were applied."""

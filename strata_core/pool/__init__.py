"""The page pool: layouts, pages, reference counts."""

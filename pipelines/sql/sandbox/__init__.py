"""Worker processes that run SQL: their pool, their channel, and what happens inside one."""

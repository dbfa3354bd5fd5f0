-- The tables of a folder of feedback.
-- A deleted question takes its verdicts and its line of the inbox (`lesson`) along; its MLflow trace goes into `gone`,
-- to be deleted there. `told` marks a verdict that MLflow has. These names stay: folders of users have such tables.
CREATE TABLE IF NOT EXISTS asked (
    id TEXT PRIMARY KEY, at TEXT NOT NULL, user TEXT NOT NULL, question TEXT NOT NULL, evidence TEXT NOT NULL,
    model TEXT NOT NULL, database TEXT NOT NULL, events TEXT NOT NULL, trace TEXT
);
CREATE INDEX IF NOT EXISTS asked_user ON asked (user);
CREATE INDEX IF NOT EXISTS asked_at ON asked (at);
CREATE TABLE IF NOT EXISTS verdict (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL REFERENCES asked ON DELETE CASCADE, at TEXT NOT NULL,
    good INTEGER NOT NULL, sql TEXT, told INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS verdict_id ON verdict (id);
CREATE TABLE IF NOT EXISTS lesson (id TEXT PRIMARY KEY REFERENCES asked ON DELETE CASCADE, line TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS gone (trace TEXT PRIMARY KEY);
CREATE TRIGGER IF NOT EXISTS forget AFTER DELETE ON asked WHEN old.trace IS NOT NULL
    BEGIN INSERT OR IGNORE INTO gone VALUES (old.trace); END;

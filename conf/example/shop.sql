-- The example shop: sqltrain connect --example
CREATE TABLE customer (name TEXT PRIMARY KEY, city TEXT, trade TEXT, age INTEGER, visits INTEGER, email TEXT);
INSERT INTO customer VALUES
    ('Ada', 'Oslo', 'smith', 6, 34, 'ada@example.org'),
    ('Bo', 'Rome', 'smith', 52, 39, 'bo@example.org'),
    ('Cy', 'Oslo', 'smith', 75, 28, 'cy@example.org'),
    ('Dot', 'Rome', 'baker', 37, 18, 'dot@example.org'),
    ('Eli', 'Paris', 'tailor', 33, 69, 'eli@example.org'),
    ('Fay', 'Rome', 'tailor', 19, 40, 'fay@example.org'),
    ('Gus', 'Paris', 'tailor', 10, 88, 'gus@example.org'),
    ('Hal', 'Oslo', 'smith', 72, 13, 'hal@example.org'),
    ('Ivy', 'Oslo', 'smith', 41, 79, 'ivy@example.org'),
    ('Jon', 'Rome', 'baker', 71, 62, 'jon@example.org'),
    ('Kim', 'Oslo', 'tailor', 34, 8, 'kim@example.org'),
    ('Lou', 'Rome', 'baker', 12, 52, 'lou@example.org');
CREATE TABLE product (name TEXT PRIMARY KEY, kind TEXT, colour TEXT, price INTEGER, stock INTEGER);
INSERT INTO product VALUES
    ('Ada', 'table', 'blue', 81, 1),
    ('Bo', 'table', 'green', 43, 32),
    ('Cy', 'table', 'green', 9, 25),
    ('Dot', 'table', 'red', 31, 19),
    ('Eli', 'table', 'green', 12, 11),
    ('Fay', 'chair', 'blue', 63, 14),
    ('Gus', 'chair', 'blue', 38, 16),
    ('Hal', 'table', 'green', 70, 27),
    ('Ivy', 'table', 'blue', 76, 37),
    ('Jon', 'chair', 'red', 77, 50),
    ('Kim', 'chair', 'blue', 31, 38),
    ('Lou', 'lamp', 'red', 24, 5);
CREATE TABLE supplier (name TEXT PRIMARY KEY, country TEXT, goods TEXT, rating INTEGER, distance INTEGER);
INSERT INTO supplier VALUES
    ('Ada', 'France', 'steel', 34, 61),
    ('Bo', 'Norway', 'wood', 87, 17),
    ('Cy', 'Norway', 'wood', 11, 90),
    ('Dot', 'France', 'steel', 51, 68),
    ('Eli', 'Italy', 'steel', 31, 28),
    ('Fay', 'France', 'steel', 54, 75),
    ('Gus', 'Italy', 'glass', 64, 85),
    ('Hal', 'France', 'steel', 46, 11),
    ('Ivy', 'Italy', 'steel', 15, 63),
    ('Jon', 'France', 'steel', 43, 25),
    ('Kim', 'Norway', 'wood', 35, 15),
    ('Lou', 'France', 'wood', 48, 22);
CREATE TABLE workshop (name TEXT PRIMARY KEY, subject TEXT, room TEXT, hours INTEGER, places INTEGER);
INSERT INTO workshop VALUES
    ('Ada', 'history', 'attic', 8, 13),
    ('Bo', 'algebra', 'cellar', 29, 6),
    ('Cy', 'music', 'cellar', 69, 78),
    ('Dot', 'music', 'hall', 4, 16),
    ('Eli', 'music', 'hall', 78, 74),
    ('Fay', 'algebra', 'attic', 12, 48),
    ('Gus', 'algebra', 'hall', 78, 3),
    ('Hal', 'algebra', 'hall', 16, 62),
    ('Ivy', 'algebra', 'cellar', 8, 87),
    ('Jon', 'algebra', 'cellar', 55, 80),
    ('Kim', 'algebra', 'attic', 9, 29),
    ('Lou', 'algebra', 'cellar', 39, 45);
CREATE TABLE purchase (id INTEGER PRIMARY KEY, customer TEXT REFERENCES customer(name), amount INTEGER, status INTEGER);
INSERT INTO purchase VALUES
    (1, 'Ada', 30, 1),
    (2, 'Ada', 10, 2),
    (3, 'Bo', 5, 1),
    (4, 'Bo', 7, 1);

SELECT count(*) FROM customer	shop
SELECT name FROM customer WHERE city = 'Lyon'	shop
SELECT c.name, sum(o.amount) FROM customer AS c JOIN orders AS o ON o.customer_id = c.id GROUP BY c.id	shop

SELECT count(id) FROM customer
SELECT name, city FROM customer WHERE city = 'Lyon'
SELECT sum(o.amount), c.name FROM customer AS c, orders AS o WHERE o.customer_id = c.id GROUP BY c.id

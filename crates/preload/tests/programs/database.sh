cd "$1" || exit 1
sqlite3 a.db 'create table t(a integer primary key, b text); insert into t(b) values ("x"),("y"); select * from t'
sqlite3 a.db 'pragma journal_mode=wal; begin; insert into t(b) values ("z"); commit; select count(*) from t'
sqlite3 a.db 'begin; insert into t(b) values ("never"); rollback; select count(*) from t; pragma integrity_check'
add() { for i in 1 2 3 4 5 6 7 8 9 10; do sqlite3 -cmd '.timeout 20000' a.db "insert into t(b) values (\"$1$i\")" || echo failed; done; }
add p & add q & wait; sqlite3 a.db 'select count(*) from t; pragma journal_mode=delete; vacuum; pragma integrity_check'
sqlite3 a.db .dump | md5sum | wc -l; sqlite3 b.db 'attach "a.db" as a; create table c as select * from a.t where b like "p%"; select count(*) from c'; ls; cp a.db c.db; sqlite3 c.db 'select max(a) from t'

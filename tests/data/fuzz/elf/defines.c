extern int outside(int);
extern int weakly(int) __attribute__((weak));
int one(int x) { return outside(x); }
int two(int x) { return weakly ? weakly(x) : x; }
int table[] = {1, 2, 3};

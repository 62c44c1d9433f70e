#include <cstdio>
#include <stdexcept>
#include <string>
namespace c10 { void gone(int); }
struct Early { Early() { std::puts("early"); } } early;
extern "C" __attribute__((visibility("default"))) int ask(const char* path) {
  c10::gone(1);
  if (!std::fopen(path, "r")) throw std::runtime_error(std::string("no ") + path);
  return 1;
}

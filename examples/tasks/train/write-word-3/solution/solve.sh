#!/bin/bash
echo coral > desk.txt
